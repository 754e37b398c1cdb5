// SPDX-License-Identifier: Apache-2.0
// What a GPU gives to kernels that only read, only copy, or only multiply.
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/ptx/mma.cuh"
#include "bench/ops/probe.h"
#include "bench/ops/rounds.h"
#include "device/buffer.h"
#include "device/cuda/check.h"

namespace tessera::bench {

namespace {

using namespace backends::cuda_common;

constexpr int kThreads = 512, kInFlight = 8, kWords = kThreads * kInFlight;

// A block reads kWords words of 16 bytes, a thread kInFlight of them at once.
__global__ void read_words(const uint4* data, size_t count, unsigned* sink) {
  wait_for_previous();
  const size_t first = static_cast<size_t>(blockIdx.x) * kWords + threadIdx.x;
  uint4 words[kInFlight];
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    const size_t at = first + static_cast<size_t>(i) * kThreads;
    words[i] = at < count ? __ldcs(data + at) : uint4{0, 0, 0, 0};
  }
  unsigned all = 0;
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) all ^= words[i].x ^ words[i].y ^ words[i].z ^ words[i].w;
  if (all == 0x5EED5EED) *sink = all;  // hardly ever, but the reads must happen to know
}

constexpr int kProductThreads = 256, kChains = 8, kSteps = 4096, kBlocksPerProcessor = 4;
constexpr int64_t kFlopsPerProduct = int64_t{2} * 16 * 8 * 16;

// Products in registers; a warp has kChains sums in the making, so that none waits for the one before.
__global__ void __launch_bounds__(kProductThreads) multiply(unsigned* sink) {
  wait_for_previous();
  float sums[kChains][4] = {};
  // Ordinary numbers, different in each lane: how fast a GPU runs depends on what it multiplies.
  const uint32_t a = 0x3F80BF00u + threadIdx.x * 0x00130029u, b = 0x3E9ABEC0u + threadIdx.x * 0x00070031u;
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < kChains; ++i) {
      ptx::mma_bf16(sums[i], a, a ^ 0x00010002u, a ^ 0x00030001u, a ^ 0x00020003u, b, b ^ 0x00010003u);
    }
  }
  float all = 0;
#pragma unroll
  for (int i = 0; i < kChains; ++i) all += sums[i][0] + sums[i][1] + sums[i][2] + sums[i][3];
  if (all == 0.123456f) *sink = 1;
}

class GpuProbe final : public Probe {
 public:
  GpuProbe(const device::GpuDevice& gpu, device::Executor& executor)
      : executor_(executor), sink_(sizeof(unsigned), executor.memory()) {
    TESSERA_CUDA_CHECK(cudaDeviceGetAttribute(&num_processors_, cudaDevAttrMultiProcessorCount, gpu.ordinal));
  }

  void read(const void* data, int64_t bytes) override {
    const size_t count = static_cast<size_t>(bytes < 16 ? 1 : bytes / 16);
    launch("read_words", executor_.queue(), read_words, dim3(static_cast<unsigned>((count + kWords - 1) / kWords)),
           kThreads, 0, static_cast<const uint4*>(data), count, sink_.as<unsigned>());
  }

  Ceilings ceilings(const void* data, int64_t bytes) override {
    Ceilings found;
    const double gigabytes = static_cast<double>(bytes) * 1e-9;
    found.read_gbs = gigabytes / measure_round(
                                     executor_, [&](int64_t) { read(data, bytes); }, 4);
    const device::Buffer copy(static_cast<size_t>(bytes), executor_.memory());
    found.copy_gbs =
        2 * gigabytes /
        measure_round(
            executor_, [&](int64_t) { executor_.memory().copy(copy.data(), data, static_cast<size_t>(bytes)); }, 4);
    const int blocks = num_processors_ * kBlocksPerProcessor;
    const double seconds = measure_round(
        executor_,
        [&](int64_t) {
          launch("multiply", executor_.queue(), multiply, dim3(static_cast<unsigned>(blocks)), kProductThreads, 0,
                 sink_.as<unsigned>());
        },
        4);
    const int64_t products = int64_t{blocks} * (kProductThreads / 32) * kChains * kSteps;
    found.mma_gflops = static_cast<double>(products * kFlopsPerProduct) / seconds * 1e-9;
    return found;
  }

 private:
  device::Executor& executor_;
  device::Buffer sink_;
  int num_processors_ = 0;
};

}  // namespace

std::unique_ptr<Probe> make_gpu_probe(const device::GpuDevice& gpu, device::Executor& executor) {
  return std::make_unique<GpuProbe>(gpu, executor);
}

}  // namespace tessera::bench
