// SPDX-License-Identifier: Apache-2.0
// Dynamic shared memory that kernels of stages ask for, without barriers: a budget like tests/budgets/kernels.tsv,
// which has what is static.
#include <gtest/gtest.h>

#include "backends/sm100/sums_plan.h"
#include "backends/sm120/sum_plans.h"
#include "backends/sm90/sum_plans.h"

#ifdef TESSERA_CUDA_EMULATED
#include <cuda_runtime_api.h>

#include "device/cuda/emulated/capability.h"
#endif

namespace tessera::backends {
namespace {

// A block's, with 1 KiB reserved: compute capability 9 and 10 have 227 KiB, 12 has 99. Barriers, and the alignment to
// 1 KiB that swizzled operands want, are the rest.
constexpr int kMost = 227 << 10, kMostOf12 = 99 << 10, kRest = 1152;

template <ops::WeightFormat kFormat, bool kFolds = false>
constexpr int wide_bytes() {
  using Wide = sm90::WidePlanOf<kFormat, kFolds>;
  return Wide::kInputStages * Wide::kTokens * Wide::kInputColumns * 2 +
         Wide::kWeightStages * Wide::kSlots * Wide::Unit::kBytes;
}

TEST(SharedMemoryBudget, Hopper) {
  using cuda_common::PackedNvfp4;
  using Few = sm90::FewPlan;
  constexpr int kFew =
      Few::kTeams * Few::kStages * (Few::kSlots * PackedNvfp4::kBytes + Few::kTokens * PackedNvfp4::kColumns * 2);
  EXPECT_EQ(wide_bytes<ops::WeightFormat::kNvfp4>(), 204800);
  EXPECT_EQ(wide_bytes<ops::WeightFormat::kFp8Block>(), 196608);
  EXPECT_EQ((wide_bytes<ops::WeightFormat::kFp8Block, true>()), 229376);
  EXPECT_EQ(wide_bytes<ops::WeightFormat::kBf16>(), 229376);
  EXPECT_EQ(kFew, 212992);
  EXPECT_LE(wide_bytes<ops::WeightFormat::kBf16>() + kRest, kMost);  // the most
  EXPECT_LE(kFew + kRest, kMost);
}

template <int kTokens, ops::WeightFormat kFormat = ops::WeightFormat::kNvfp4>
constexpr int ring_bytes() {
  using Ring = sm90::RingPlan<kTokens, kFormat>;
  return Ring::kStages * (512 / cuda_common::PackedUnit<kFormat>::kColumns) * cuda_common::PackedUnit<kFormat>::kBytes +
         2 * Ring::kRoundUnits * 16 * kTokens * 4;
}

TEST(SharedMemoryBudget, HopperRings) {
  constexpr int kList = 3200;  // of experts
  EXPECT_EQ(ring_bytes<1>(), 219136);
  EXPECT_EQ(ring_bytes<8>(), 217088);
  EXPECT_EQ((ring_bytes<1, ops::WeightFormat::kFp8Block>()), 212992);
  EXPECT_EQ((ring_bytes<8, ops::WeightFormat::kFp8Block>()), 229376);
  EXPECT_LE(ring_bytes<1>() + kRest + kList, kMost);
  EXPECT_LE((ring_bytes<8, ops::WeightFormat::kFp8Block>()) + kRest, kMost);  // of maps, which have no list
}

TEST(SharedMemoryBudget, TensorMemory) {
  using Many = sm100::SumsPlan<1, sm100::kMostTileTokens, 1>;
  using Few = sm100::SumsPlan<1, sm100::kFewTileTokens, 1>;
  using Pair = sm100::SumsPlan<1, sm100::kPairTileTokens, 2>;
  using WidePair = sm100::SumsPlan<1, sm100::kWidePairTileTokens, 2>;
  using TwoPairs = sm100::SumsPlan<1, sm100::kWidePairTileTokens, 4>;
  using GateAndUp = sm100::SumsPlan<2, sm100::kMostTileTokens, 1>;
  using FewGateAndUp = sm100::SumsPlan<2, sm100::kFewTileTokens, 1>;
  EXPECT_EQ(Many::kStages * Many::kStageBytes, 6 * 36864);
  EXPECT_EQ(Few::kStages * Few::kStageBytes, 8 * 24576);
  EXPECT_EQ(Pair::kStages * Pair::kStageBytes, 6 * 34816);
  EXPECT_EQ(WidePair::kStages * WidePair::kStageBytes, 5 * 38912);
  EXPECT_EQ(TwoPairs::kStages * TwoPairs::kStageBytes, 5 * 38912);
  EXPECT_EQ(GateAndUp::kStages * GateAndUp::kStageBytes, 4 * 55296);
  EXPECT_EQ(FewGateAndUp::kStages * FewGateAndUp::kStageBytes, 5 * 43008);
  for (const int bytes : {Many::kStages * Many::kStageBytes, GateAndUp::kStages * GateAndUp::kStageBytes}) {
    EXPECT_LE(bytes + kRest, kMost);
  }
}

TEST(SharedMemoryBudget, WarpProducts) {
  using Wide = sm120::WidePlan;
  EXPECT_EQ(Wide::kStages * Wide::kStageBytes, 2 * 36864);
  EXPECT_LE(Wide::kStages * Wide::kStageBytes + kRest, kMostOf12);
}

#ifdef TESSERA_CUDA_EMULATED
TEST(SharedMemoryBudget, AnEmulatedGpuHasThatOfItsCapability) {
  struct Restored {
    ~Restored() { device::emulated::set_compute_capability(9, 0); }
  } const restored;
  static constexpr char kKernel = 0;
  for (const auto& [major, bytes] : {std::pair{9, kMost}, {10, kMost}, {12, kMostOf12}}) {
    device::emulated::set_compute_capability(major, 0);
    int most = 0;
    ASSERT_EQ(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0), cudaSuccess);
    EXPECT_EQ(most, bytes);
    constexpr auto kMostDynamic = cudaFuncAttributeMaxDynamicSharedMemorySize;
    EXPECT_EQ(cudaFuncSetAttribute(&kKernel, kMostDynamic, bytes), cudaSuccess);
    EXPECT_EQ(cudaFuncSetAttribute(&kKernel, kMostDynamic, bytes + 1), cudaErrorInvalidValue);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  }
}
#endif

}  // namespace
}  // namespace tessera::backends
