// SPDX-License-Identifier: Apache-2.0
// Weights packed for a GPU's tensor cores: every bit has a place, the GPU packs as the host does, unpacking restores
// them, padding is zero.
#include "backends/cuda_common/packed_units.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "backends/layout_round_trip.h"
#include "numeric/bf16.h"
#include "ops/packed_weight.h"
#include "testing/gpu_stage.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

using ops::WeightFormat;

constexpr WeightFormat kFormats[] = {WeightFormat::kNvfp4, WeightFormat::kFp8Block, WeightFormat::kBf16};

// Rows and columns that fill no unit, and no row of scales.
class PackedUnitsTest : public testing::RandomTest {
 protected:
  testing::RandomWeight weight(WeightFormat format, int64_t rows, int64_t cols) {
    testing::RandomWeight made = testing::random_weight(rng_, format, rows, cols);
    // Any bits at all, NaN and infinities too: packing reads no values.
    for (const device::Buffer* buffer : {&made.data, &made.scales}) {
      for (size_t i = 0; i < buffer->size(); ++i) buffer->as<uint8_t>()[i] = static_cast<uint8_t>(rng_.below(256));
    }
    return made;
  }
};

TEST_F(PackedUnitsTest, UnpackRestoresEveryBit) {
  for (const WeightFormat format : kFormats) {
    for (const int64_t rows : {1, 15, 16, 17, 33, 130}) {
      const int64_t cols = 16 * (1 + static_cast<int64_t>(rng_.below(60)));
      SCOPED_TRACE(std::string(ops::to_string(format)) + " " + std::to_string(rows) + " x " + std::to_string(cols));
      testing::expect_round_trip(*backends::cuda_common::packed_units(format), weight(format, rows, cols));
    }
  }
}

TEST_F(PackedUnitsTest, UnpackRestoresScalesThatFold) {
  for (const int64_t rows : {1, 130, 300}) {
    testing::RandomWeight folded =
        weight(WeightFormat::kFp8Block, rows, 16 * (1 + static_cast<int64_t>(rng_.below(60))));
    testing::set_fp8_scales(folded, rng_, true);
    folded.view.scales_fold = true;
    testing::expect_round_trip(*backends::cuda_common::packed_units(WeightFormat::kFp8Block), folded);
  }
  for (int exponent = -100; exponent <= 7; ++exponent) {
    const auto bits = std::bit_cast<uint32_t>(std::ldexp(1.0f, exponent));
    const uint32_t folded = backends::cuda_common::folded_scale(bits);
    EXPECT_TRUE(backends::cuda_common::is_folded_scale(folded));
    EXPECT_EQ(numeric::bf16_to_float(static_cast<uint16_t>(folded)), std::ldexp(1.0f, exponent + 120));
    EXPECT_EQ(backends::cuda_common::unfolded_scale(folded), bits);
  }
}

// What memory is needed beside the checkpoint's bytes: none at the widths of Flash and Pro.
TEST_F(PackedUnitsTest, RealShapesArePackedIntoTheSameBytes) {
  for (const WeightFormat format : kFormats) {
    for (const auto& [rows, cols] :
         {std::pair<int64_t, int64_t>{1024, 4096}, {32768, 1536}, {64, 7168}, {129280, 4096}}) {
      const ops::WeightView view{.format = format, .rows = rows, .cols = cols};
      const ops::PackedLayout& layout = *backends::cuda_common::packed_units(format);
      EXPECT_EQ(layout.data_bytes(view) + layout.scale_bytes(view), view.data_bytes() + view.scale_bytes());
    }
  }
}

// Widths of ranks: NVFP4's last unit has the scales of 512 columns, and the codes of those that are there by 128.
TEST_F(PackedUnitsTest, ARowEndsWithItsColumns) {
  const auto bytes = [](int64_t cols) {
    const auto of_rows = [&](int64_t rows) {
      const ops::WeightView view{.format = WeightFormat::kNvfp4, .rows = rows, .cols = cols};
      return backends::cuda_common::packed_units(WeightFormat::kNvfp4)->data_bytes(view);
    };
    // Behind the last row there is room for a whole unit.
    EXPECT_EQ(of_rows(16) % 4608, 0);
    return of_rows(160) - of_rows(144);
  };
  EXPECT_EQ(bytes(128), 512 + 1024);
  EXPECT_EQ(bytes(144), 512 + 2048);
  EXPECT_EQ(bytes(256), 512 + 2048);
  EXPECT_EQ(bytes(384), 512 + 3072);
  EXPECT_EQ(bytes(400), 4608);
  EXPECT_EQ(bytes(512), 4608);
  EXPECT_EQ(bytes(768), 4608 + 512 + 2048);
}

TEST_F(PackedUnitsTest, AGpuPacksAsTheHostDoes) {
  std::string why_not;
  if (!testing::find_test_gpu(why_not).has_value()) GTEST_SKIP() << why_not;
  device::Executor& gpu = testing::gpu_stage_memory().executor();
  device::Queue queue(1);
  for (int i = 0; i <= std::ssize(kFormats); ++i) {  // at last FP8 whose scales fold
    const bool folds = i == std::ssize(kFormats);
    const WeightFormat format = folds ? WeightFormat::kFp8Block : kFormats[i];
    const ops::PackedLayout* layout = backends::cuda_common::packed_units(format);
    testing::RandomWeight made = weight(format, 37, 16 * 41);
    made.view.scales_fold = folds;
    if (made.view.scales_fold) testing::set_fp8_scales(made, rng_, true);
    const ops::PackedWeight expected = ops::pack_weight(layout, made.view, queue);
    const device::Buffer data = made.data.clone_into(gpu.memory()), scales = made.scales.clone_into(gpu.memory());
    ops::WeightView placed = made.view;
    placed.data = data.data(), placed.block_scales = scales.data();
    const ops::PackedWeight packed = ops::pack_weight(layout, placed, gpu.queue(), gpu.memory());
    const auto expect_same = [&](const device::Buffer& there, const device::Buffer& here) {
      ASSERT_EQ(there.size(), here.size());
      if (here.size() == 0) return;
      const device::Buffer found(there.size());
      gpu.memory().download(found.data(), there.data(), found.size());
      EXPECT_EQ(std::memcmp(found.data(), here.data(), found.size()), 0) << ops::to_string(format);
    };
    expect_same(packed.data, expected.data);
    expect_same(packed.scales, expected.scales);
  }
}

}  // namespace
}  // namespace tessera
