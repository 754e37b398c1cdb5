// SPDX-License-Identifier: Apache-2.0
#include "backends/tcgen05_rules.h"

#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/ptx/cluster.cuh"
#include "backends/cuda_common/ptx/tcgen05.cuh"
#include "backends/cuda_common/tcgen05_operands.h"

namespace tessera::testing {

namespace {

using namespace backends::cuda_common;
namespace tcgen05 = ptx::tcgen05;

constexpr int kM = 128, kThreads = 192;  // rows of a block

// Of a pair more columns of N than one atom of scales is for.
template <int kBlocks>
struct Plan {
  static constexpr int kN = kBlocks == 1 ? 32 : 144, kAtoms = (kN + ScaleAtom::kRows - 1) / ScaleAtom::kRows;
  static constexpr int kColumns = kBlocks == 1 ? 128 : 256;
  static constexpr uint32_t kScalesOfA = kColumns - 64, kScalesOfB = kScalesOfA + 8;  // columns behind the first
};

template <int kBlocks>
struct Shared {
  uint8_t a[SwizzledCodes::kRowBytes * kM], b[SwizzledCodes::kRowBytes * Plan<kBlocks>::kN / kBlocks];
  uint8_t a_scales[ScaleAtom::kBytes], b_scales[Plan<kBlocks>::kAtoms][ScaleAtom::kBytes];
  ptx::SharedBarrier done, again, bytes, both;
  uint32_t memory;
};

template <int kBlocks>
__device__ void multiply(Shared<kBlocks>& s, BrokenRule rule, bool adds) {
  using Columns = Plan<kBlocks>;
  const auto is = [&](BrokenRule one) { return rule == one; };
  const uint32_t memory = s.memory;
  if (is(BrokenRule::kBothGroups)) {
    tcgen05::cp_scales<1>(memory + Columns::kScalesOfA, scales_descriptor(ptx::shared_address(s.a_scales)));
  } else if (!is(BrokenRule::kNoScalesOfA)) {
    tcgen05::cp_scales<kBlocks>(memory + Columns::kScalesOfA, scales_descriptor(ptx::shared_address(s.a_scales)));
  }
  const int atoms = is(BrokenRule::kNoScalesOfB) ? 0 : is(BrokenRule::kScalesOfFewer) ? 1 : Columns::kAtoms;
  for (int atom = 0; atom < atoms; ++atom) {
    tcgen05::cp_scales<kBlocks>(memory + Columns::kScalesOfB + static_cast<uint32_t>(atom * ScaleAtom::kColumns),
                                scales_descriptor(ptx::shared_address(s.b_scales[atom])));
  }
  uint64_t a = codes_descriptor(ptx::shared_address(s.a));
  if (is(BrokenRule::kStride)) a += uint64_t{1} << 32;
  const int m = is(BrokenRule::kRowsOfOneBlock) ? kM : kM * kBlocks;
  const int n = is(BrokenRule::kColumnsInEights) ? Columns::kN + 8 : Columns::kN;
  tcgen05::mma_nvfp4<kBlocks>(
      is(BrokenRule::kColumns) ? memory - 8 : memory, a, codes_descriptor(ptx::shared_address(s.b)),
      nvfp4_instruction(m, n) | (is(BrokenRule::kReservedBits) ? 1u << 12 : 0),
      is(BrokenRule::kScaleColumns) ? memory + Columns::kColumns - 2 : memory + Columns::kScalesOfA,
      is(BrokenRule::kOverlap) ? memory + 8 : memory + Columns::kScalesOfB, adds || is(BrokenRule::kAddsToNothing));
}

template <int kBlocks>
__device__ void sync_blocks() {
  if constexpr (kBlocks == 1) {
    __syncthreads();
  } else {
    ptx::sync_cluster();
  }
}

// By one thread of the block that does not issue.
template <int kBlocks>
__device__ void issue_in_odd_block(Shared<kBlocks>& s, BrokenRule rule) {
  if (rule == BrokenRule::kOddCopies) {
    tcgen05::cp_scales<kBlocks>(s.memory + Plan<kBlocks>::kScalesOfA,
                                scales_descriptor(ptx::shared_address(s.a_scales)));
  }
  if (rule == BrokenRule::kOddMultiplies) {
    const uint64_t codes = codes_descriptor(ptx::shared_address(s.a));
    tcgen05::mma_nvfp4<kBlocks>(s.memory, codes, codes, nvfp4_instruction(kM * kBlocks, Plan<kBlocks>::kN),
                                s.memory + Plan<kBlocks>::kScalesOfA, s.memory + Plan<kBlocks>::kScalesOfB, false);
  }
  if (rule == BrokenRule::kOddCommits) tcgen05::commit<kBlocks>(s.done);
}

template <int kBlocks>
__global__ void __launch_bounds__(kThreads) product(BrokenRule rule) {
  using Columns = Plan<kBlocks>;
  auto& s = *swizzled_shared<Shared<kBlocks>>();
  const auto is = [&](BrokenRule one) { return rule == one; };
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const bool is_odd = kBlocks > 1 && ptx::cluster_rank() % 2 != 0;
  const auto is_odds = [&](BrokenRule one) { return is_odd && is(one); };
  const bool is_issuer = thread == 128 && !is_odd;
  const int columns = is_odds(BrokenRule::kOddHasLess) ? Columns::kColumns / 2 : Columns::kColumns;
  if (warp == 4) tcgen05::alloc<kBlocks>(&s.memory, columns);
  if (thread == 0) s.done.init(1), s.again.init(1), s.bytes.init(1), s.both.init(kBlocks);
  for (int i = thread; i < static_cast<int>(sizeof(s.a)); i += kThreads) s.a[i] = static_cast<uint8_t>(i * 37);
  for (int i = thread; i < static_cast<int>(sizeof(s.b)); i += kThreads) s.b[i] = static_cast<uint8_t>(i * 73);
  for (int i = thread; i < ScaleAtom::kBytes; i += kThreads) {
    s.a_scales[i] = 0x38;
    for (auto& atom : s.b_scales) atom[i] = 0x38;
    if (i == 0 && is_odds(BrokenRule::kOddScales)) s.b_scales[Columns::kAtoms - 1][i] = 0x30;
  }
  sync_blocks<kBlocks>();
  if constexpr (kBlocks > 1) {
    if (thread == 128 && is_odd) issue_in_odd_block(s, rule);
    if (thread == 128 && !is_odds(BrokenRule::kOddKeepsBack)) ptx::arrive_at(s.both, 0);
    if (is_issuer) s.both.wait(0);
  }
  if (is_issuer) {
    multiply(s, rule, false);
    if (!is(BrokenRule::kNoWaitForProducts)) {
      tcgen05::commit<kBlocks>(s.done, is(BrokenRule::kTellsNobody) ? 4 : 3);
    }
    if (is(BrokenRule::kNoPair)) tcgen05::commit<2>(s.done);
    if (is(BrokenRule::kBeginsAnew)) multiply(s, rule, false);
    if (is(BrokenRule::kScalesOverSums)) {
      tcgen05::cp_scales<kBlocks>(s.memory, scales_descriptor(ptx::shared_address(s.a_scales)));
    }
    if (is(BrokenRule::kMissingBytes)) s.bytes.arrive_and_expect(16), s.bytes.wait(0);
  }
  if (thread == 160 && is(BrokenRule::kTwoIssuers)) multiply(s, rule, false);
  if (warp < 4) {
    const bool is_early = is(BrokenRule::kNoWaitForProducts) || is_odds(BrokenRule::kOddIsEarly);
    if (!is_early) s.done.wait(0);
    uint32_t sums[8];
    const uint32_t lanes = static_cast<uint32_t>(32 * (is(BrokenRule::kOtherLanes) ? 3 - warp : warp)) << 16;
    for (int i = 0; i < 20 && is_early; ++i) __nanosleep(1'000'000);  // until it is issued
    for (uint32_t first = 0; first < Columns::kN && !is_odds(BrokenRule::kOddLeavesSums); first += 8) {
      tcgen05::ld(sums, s.memory + lanes + first);
      if (!is(BrokenRule::kNoWaitForLoad) && !is_odds(BrokenRule::kOddIsLoading)) tcgen05::wait_ld(sums);
    }
  }
  sync_blocks<kBlocks>();
  if (is_issuer) {
    multiply(s, rule, is(BrokenRule::kNoWaitForLoad) || is(BrokenRule::kOddIsLoading));
    tcgen05::commit<kBlocks>(s.again);
  }
  if (warp < 4) s.again.wait(0);
  sync_blocks<kBlocks>();
  if (warp == 4) tcgen05::dealloc<kBlocks>(s.memory, is(BrokenRule::kDealloc) ? Columns::kColumns / 2 : columns);
}

template <int kBlocks>
void launch_product(BrokenRule rule) {
  const device::Queue queue(1);
  launch_clusters("product", queue, product<kBlocks>, dim3(kBlocks), kThreads, sizeof(Shared<kBlocks>), kBlocks, rule);
}

}  // namespace

bool obeys_rules(BrokenRule rule, int num_blocks) {
  num_blocks == 1 ? launch_product<1>(rule) : launch_product<2>(rule);
  return cudaDeviceSynchronize() == cudaSuccess;
}

}  // namespace tessera::testing
