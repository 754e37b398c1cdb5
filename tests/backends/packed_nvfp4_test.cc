// SPDX-License-Identifier: Apache-2.0
// NVFP4 weights packed for a GPU's tensor cores: every bit has a place, the GPU packs as the host does, unpacking
// restores them, padding is zero.
#include "backends/cuda_common/packed_nvfp4.h"

#include <gtest/gtest.h>

#include <cstring>

#include "backends/layout_round_trip.h"
#include "ops/packed_weight.h"
#include "testing/gpu_stage.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

class PackedNvfp4Test : public testing::RandomTest {};

TEST_F(PackedNvfp4Test, UnpackRestoresEveryBit) {
  const ops::PackedLayout& layout = *backends::cuda_common::packed_nvfp4();
  for (const int64_t rows : {1, 15, 16, 17, 33, 130}) {
    const int64_t cols = 16 * (1 + static_cast<int64_t>(rng_.below(60)));
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(cols));
    const testing::RandomWeight weight = testing::random_weight(rng_, ops::WeightFormat::kNvfp4, rows, cols);
    testing::expect_round_trip(layout, weight);
  }
}

TEST_F(PackedNvfp4Test, AGpuPacksAsTheHostDoes) {
  std::string why_not;
  if (!testing::find_test_gpu(why_not).has_value()) GTEST_SKIP() << why_not;
  device::Executor& gpu = testing::gpu_stage_memory().executor();
  const ops::PackedLayout* layout = backends::cuda_common::packed_nvfp4();
  const testing::RandomWeight weight = testing::random_weight(rng_, ops::WeightFormat::kNvfp4, 37, 16 * 41);
  device::Queue queue(1);
  const ops::PackedWeight expected = ops::pack_weight(layout, weight.view, queue);
  const device::Buffer data = weight.data.clone_into(gpu.memory()), scales = weight.scales.clone_into(gpu.memory());
  ops::WeightView placed = weight.view;
  placed.data = data.data(), placed.block_scales = scales.data();
  const ops::PackedWeight packed = ops::pack_weight(layout, placed, gpu.queue(), gpu.memory());
  const device::Buffer found(packed.data.size());
  gpu.memory().download(found.data(), packed.data.data(), found.size());
  ASSERT_EQ(found.size(), expected.data.size());
  EXPECT_EQ(std::memcmp(found.data(), expected.data.data(), found.size()), 0);
}

}  // namespace
}  // namespace tessera
