// SPDX-License-Identifier: Apache-2.0
#include "backends/tcgen05_rules.h"

#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/ptx/tcgen05.cuh"
#include "backends/cuda_common/tcgen05_operands.h"

namespace tessera::testing {

namespace {

using namespace backends::cuda_common;
namespace tcgen05 = ptx::tcgen05;

constexpr int kM = 128, kN = 32, kThreads = 192;
constexpr uint32_t kScalesOfA = 64, kScalesOfB = 72;  // columns behind the first

struct Shared {
  uint8_t a[SwizzledCodes::kRowBytes * kM], b[SwizzledCodes::kRowBytes * kN];
  uint8_t a_scales[ScaleAtom::kBytes], b_scales[ScaleAtom::kBytes];
  ptx::SharedBarrier done, again, bytes;
  uint32_t memory;
};

__device__ void multiply(Shared& s, BrokenRule rule, bool adds) {
  const auto is = [&](BrokenRule one) { return rule == one; };
  const uint32_t memory = s.memory;
  if (!is(BrokenRule::kNoScalesOfA)) {
    tcgen05::cp_scales(memory + kScalesOfA, scales_descriptor(ptx::shared_address(s.a_scales)));
  }
  if (!is(BrokenRule::kNoScalesOfB)) {
    tcgen05::cp_scales(memory + kScalesOfB, scales_descriptor(ptx::shared_address(s.b_scales)));
  }
  uint64_t a = codes_descriptor(ptx::shared_address(s.a));
  if (is(BrokenRule::kStride)) a += uint64_t{1} << 32;
  tcgen05::mma_nvfp4(is(BrokenRule::kColumns) ? memory - 8 : memory, a, codes_descriptor(ptx::shared_address(s.b)),
                     nvfp4_instruction(kM, kN) | (is(BrokenRule::kReservedBits) ? 1u << 12 : 0),
                     is(BrokenRule::kScaleColumns) ? memory + 126 : memory + kScalesOfA,
                     is(BrokenRule::kOverlap) ? memory + 8 : memory + kScalesOfB,
                     adds || is(BrokenRule::kAddsToNothing));
}

__global__ void __launch_bounds__(kThreads) product(BrokenRule rule) {
  Shared& s = *swizzled_shared<Shared>();
  const auto is = [&](BrokenRule one) { return rule == one; };
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  if (warp == 4) tcgen05::alloc(&s.memory, 128);
  if (thread == 0) s.done.init(1), s.again.init(1), s.bytes.init(1);
  for (int i = thread; i < static_cast<int>(sizeof(s.a)); i += kThreads) s.a[i] = static_cast<uint8_t>(i * 37);
  for (int i = thread; i < static_cast<int>(sizeof(s.b)); i += kThreads) s.b[i] = static_cast<uint8_t>(i * 73);
  for (int i = thread; i < ScaleAtom::kBytes; i += kThreads) s.a_scales[i] = s.b_scales[i] = 0x38;
  __syncthreads();
  if (thread == 128) {
    multiply(s, rule, false);
    if (!is(BrokenRule::kNoWaitForProducts)) tcgen05::commit(s.done);
    if (is(BrokenRule::kNoPair)) tcgen05::commit<2>(s.done);
    if (is(BrokenRule::kBeginsAnew)) multiply(s, rule, false);
    if (is(BrokenRule::kScalesOverSums))
      tcgen05::cp_scales(s.memory, scales_descriptor(ptx::shared_address(s.a_scales)));
    if (is(BrokenRule::kMissingBytes)) s.bytes.arrive_and_expect(16), s.bytes.wait(0);
  }
  if (thread == 160 && is(BrokenRule::kTwoIssuers)) multiply(s, rule, false);
  if (warp < 4) {
    if (!is(BrokenRule::kNoWaitForProducts)) s.done.wait(0);
    uint32_t sums[8];
    const uint32_t lanes = static_cast<uint32_t>(32 * (is(BrokenRule::kOtherLanes) ? 3 - warp : warp)) << 16;
    for (int i = 0; i < 20 && is(BrokenRule::kNoWaitForProducts); ++i) __nanosleep(1'000'000);  // until it is issued
    for (uint32_t first = 0; first < kN; first += 8) {
      tcgen05::ld(sums, s.memory + lanes + first);
      if (!is(BrokenRule::kNoWaitForLoad)) tcgen05::wait_ld(sums);
    }
  }
  __syncthreads();
  if (thread == 128) multiply(s, rule, is(BrokenRule::kNoWaitForLoad)), tcgen05::commit(s.again);
  if (warp < 4) s.again.wait(0);
  __syncthreads();
  if (warp == 4) tcgen05::dealloc(s.memory, is(BrokenRule::kDealloc) ? 64 : 128);
}

}  // namespace

bool obeys_rules(BrokenRule rule) {
  TESSERA_CUDA_CHECK(
      cudaFuncSetAttribute(product, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sizeof(Shared))));
  product<<<1, kThreads, sizeof(Shared)>>>(rule);
  TESSERA_CUDA_CHECK(cudaGetLastError());
  return cudaDeviceSynchronize() == cudaSuccess;
}

}  // namespace tessera::testing
