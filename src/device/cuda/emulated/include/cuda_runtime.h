// SPDX-License-Identifier: Apache-2.0
#pragma once
// CUDA's device language as far as Tessera's kernels use it, for the emulated GPU: kernels are compiled as C++ and run
// as written, a fibre per thread (device/cuda/emulated/block.h). The build includes this before each .cu file, as nvcc
// includes NVIDIA's header of the same name.
#include <cuda_runtime_api.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <tuple>

#include "device/cuda/emulated/block.h"
#include "device/cuda/emulated/stream.h"

#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// One block runs at a time, so that its shared variables may be the program's. In a section of their own, which is
// poisoned before each block; AddressSanitizer guards them instead where it is there.
#ifdef __SANITIZE_ADDRESS__
#define __shared__ static
#else
#define __shared__ __attribute__((section("tessera_shared"))) static
#endif

inline uint3& threadIdx = tessera::device::emulated::current.thread;
inline uint3& blockIdx = tessera::device::emulated::current.block;
inline dim3& blockDim = tessera::device::emulated::current.block_size;
inline dim3& gridDim = tessera::device::emulated::current.grid_size;

struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

// The overloads that CUDA has, so that mixed types are as ambiguous here as there.
#define TESSERA_EMULATED_MIN_MAX(T) \
  constexpr T min(T a, T b) {       \
    return b < a ? b : a;           \
  }                                 \
  constexpr T max(T a, T b) {       \
    return a < b ? b : a;           \
  }
TESSERA_EMULATED_MIN_MAX(int)
TESSERA_EMULATED_MIN_MAX(unsigned)
TESSERA_EMULATED_MIN_MAX(long)
TESSERA_EMULATED_MIN_MAX(unsigned long)
TESSERA_EMULATED_MIN_MAX(long long)
TESSERA_EMULATED_MIN_MAX(unsigned long long)
#undef TESSERA_EMULATED_MIN_MAX
inline float min(float a, float b) {
  return std::fmin(a, b);
}
inline float max(float a, float b) {
  return std::fmax(a, b);
}

using std::exp;
using std::isfinite;
using std::isnan;
inline unsigned __float_as_uint(float x) {
  return std::bit_cast<unsigned>(x);
}
inline float __uint_as_float(unsigned x) {
  return std::bit_cast<float>(x);
}
// Selectors that replicate a sign are not emulated.
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selectors) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  unsigned result = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned selector = selectors >> (4 * i) & 15;
    if (selector > 7) std::abort();
    result |= static_cast<unsigned>(bytes >> (8 * selector) & 255) << (8 * i);
  }
  return result;
}
template <class T>
T __ldg(const T* address) {
  return *address;
}

template <class T>
T __ldcs(const T* address) {
  return *address;
}

// Fibres change only where they wait for each other, so plain reads and writes are atomic.
template <class T>
T atomicAdd(T* address, T value) {
  const T old = *address;
  *address = old + value;
  return old;
}
template <class T>
T atomicMax(T* address, T value) {
  const T old = *address;
  *address = value > old ? value : old;
  return old;
}
template <class T>
T atomicMin(T* address, T value) {
  const T old = *address;
  *address = value < old ? value : old;
  return old;
}

namespace tessera::device::emulated {

template <class T>
struct Shuffle {
  T value;
  int source;  // lane
};

template <class T>
T shuffle(unsigned mask, T value, int source, const Site& site) {
  Shuffle<T> mine{value, source};
  collective(site, mask, &mine, [](void* const(&lanes)[kWarp]) {
    T values[kWarp] = {};
    for (int i = 0; i < kWarp; ++i) {
      if (lanes[i] != nullptr) values[i] = static_cast<Shuffle<T>*>(lanes[i])->value;
    }
    for (void* lane : lanes) {
      if (lane == nullptr) continue;
      Shuffle<T>& result = *static_cast<Shuffle<T>*>(lane);
      if (lanes[result.source] == nullptr) fail("a shuffle reads a lane that takes no part");
      result.value = values[result.source];
    }
  });
  return mine.value;
}

// `source` where it lies in this lane's section of `width` lanes, else this lane.
inline int within(int source, int width) {
  const int lane = current.lane();
  return source >= 0 && source / width == lane / width ? source : lane;
}

}  // namespace tessera::device::emulated

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              const tessera::device::emulated::Site& site = tessera::device::emulated::Site::current()) {
  const int lane = tessera::device::emulated::current.lane();
  return tessera::device::emulated::shuffle(mask, value, lane / width * width + source % width, site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 const tessera::device::emulated::Site& site = tessera::device::emulated::Site::current()) {
  const int lane = tessera::device::emulated::current.lane();
  return tessera::device::emulated::shuffle(
      mask, value, tessera::device::emulated::within(lane - static_cast<int>(delta), width), site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   const tessera::device::emulated::Site& site = tessera::device::emulated::Site::current()) {
  const int lane = tessera::device::emulated::current.lane();
  return tessera::device::emulated::shuffle(
      mask, value, tessera::device::emulated::within(lane + static_cast<int>(delta), width), site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32,
                  const tessera::device::emulated::Site& site = tessera::device::emulated::Site::current()) {
  const int lane = tessera::device::emulated::current.lane();
  return tessera::device::emulated::shuffle(mask, value, tessera::device::emulated::within(lane ^ lanes, width), site);
}
namespace tessera::device::emulated {

// All lanes of the mask get fold(their values).
template <class Fold>
unsigned reduce(unsigned mask, unsigned value, const Site& site, Fold) {
  collective(site, mask, &value, [](void* const(&lanes)[kWarp]) {
    const unsigned* first = nullptr;
    unsigned all = 0;
    for (void* lane : lanes) {
      if (lane == nullptr) continue;
      const unsigned* one = static_cast<unsigned*>(lane);
      all = first == nullptr ? *one : Fold()(all, *one);
      first = one;
    }
    for (void* lane : lanes) {
      if (lane != nullptr) *static_cast<unsigned*>(lane) = all;
    }
  });
  return value;
}

}  // namespace tessera::device::emulated

inline unsigned __reduce_max_sync(
    unsigned mask, unsigned value,
    const tessera::device::emulated::Site& site = tessera::device::emulated::Site::current()) {
  return tessera::device::emulated::reduce(mask, value, site, [](unsigned a, unsigned b) { return max(a, b); });
}
inline unsigned __reduce_min_sync(
    unsigned mask, unsigned value,
    const tessera::device::emulated::Site& site = tessera::device::emulated::Site::current()) {
  return tessera::device::emulated::reduce(mask, value, site, [](unsigned a, unsigned b) { return min(a, b); });
}
inline unsigned __reduce_add_sync(
    unsigned mask, unsigned value,
    const tessera::device::emulated::Site& site = tessera::device::emulated::Site::current()) {
  return tessera::device::emulated::reduce(mask, value, site, [](unsigned a, unsigned b) { return a + b; });
}
inline unsigned __ballot_sync(
    unsigned mask, bool predicate,
    const tessera::device::emulated::Site& site = tessera::device::emulated::Site::current()) {
  return __reduce_add_sync(mask, predicate ? 1u << tessera::device::emulated::current.lane() : 0u, site);
}
inline int __popc(unsigned word) {
  return __builtin_popcount(word);
}
inline int __popcll(unsigned long long word) {
  return __builtin_popcountll(word);
}
inline int __ffsll(long long word) {
  return __builtin_ffsll(word);
}
inline int __clz(int word) {
  return word == 0 ? 32 : __builtin_clz(static_cast<unsigned>(word));
}
inline int __any_sync(unsigned mask, int predicate,
                      const tessera::device::emulated::Site& site = tessera::device::emulated::Site::current()) {
  return __ballot_sync(mask, predicate != 0, site) != 0 ? 1 : 0;
}
inline void __syncwarp(unsigned mask = ~0u,
                       const tessera::device::emulated::Site& site = tessera::device::emulated::Site::current()) {
  tessera::device::emulated::collective(site, mask, &mask, [](void* const(&)[tessera::device::emulated::kWarp]) {});
}
inline void __syncthreads(const tessera::device::emulated::Site& site = tessera::device::emulated::Site::current()) {
  tessera::device::emulated::sync_block(site);
}

// The kernel's arguments are copied now, for every thread anew, as the GPU does.
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  return tessera::device::emulated::launch(
      *config, reinterpret_cast<const void*>(kernel),
      [kernel, values = std::tuple<Parameters...>(arguments...)] { std::apply(kernel, values); });
}
