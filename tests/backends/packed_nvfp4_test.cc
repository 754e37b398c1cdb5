// SPDX-License-Identifier: Apache-2.0
// NVFP4 weights packed for a GPU's tensor cores: every bit has a place, the GPU packs as the host does, unpacking
// restores them, padding is zero.
#include "backends/cuda_common/packed_nvfp4.h"

#include <gtest/gtest.h>

#include <cstring>

#include "ops/packed_weight.h"
#include "testing/gpu_stage.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

class PackedNvfp4Test : public testing::RandomTest {};

int64_t count_bits(const device::Buffer& buffer) {
  int64_t count = 0;
  for (size_t i = 0; i < buffer.size(); ++i) count += __builtin_popcount(buffer.as<uint8_t>()[i]);
  return count;
}

TEST_F(PackedNvfp4Test, UnpackRestoresEveryBit) {
  const ops::PackedLayout& layout = *backends::cuda_common::packed_nvfp4();
  for (const int64_t rows : {1, 15, 16, 17, 33, 130}) {
    const int64_t cols = 16 * (1 + static_cast<int64_t>(rng_.below(60)));
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(cols));
    const testing::RandomWeight weight = testing::random_weight(rng_, ops::WeightFormat::kNvfp4, rows, cols);
    device::Buffer data(static_cast<size_t>(layout.data_bytes(weight.view)));
    std::memset(data.data(), 0xFF, data.size());
    ops::WeightView packed = weight.view;
    packed.data = data.data(), packed.block_scales = nullptr;
    device::Queue queue(2), one(1);
    layout.pack(weight.view, packed, queue);
    EXPECT_EQ(count_bits(data), count_bits(weight.data) + count_bits(weight.scales)) << "a permutation, and zeros";
    const device::Buffer data_back(weight.data.size()), scales_back(weight.scales.size());
    ops::WeightView back = weight.view;
    back.data = data_back.data(), back.block_scales = scales_back.data();
    layout.unpack(packed, back, one);
    EXPECT_EQ(std::memcmp(data_back.data(), weight.data.data(), weight.data.size()), 0);
    EXPECT_EQ(std::memcmp(scales_back.data(), weight.scales.data(), weight.scales.size()), 0);
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
