// SPDX-License-Identifier: Apache-2.0
// Packed weights: every bit has a place, unpacking restores them, padding is zero.
#include "backends/cpu_common/panel_layout.h"

#include <gtest/gtest.h>

#include <cstring>

#include "testing/op_harness.h"

namespace tessera {
namespace {

using ops::WeightFormat;

class PanelLayoutTest : public testing::RandomTest {};

int64_t count_bits(const device::Buffer& buffer) {
  int64_t count = 0;
  for (size_t i = 0; i < buffer.size(); ++i) count += __builtin_popcount(buffer.as<uint8_t>()[i]);
  return count;
}

TEST_F(PanelLayoutTest, UnpackRestoresEveryBit) {
  const ops::PackedLayout& layout = *backends::cpu_common::panel_layout();
  for (const auto format : {WeightFormat::kF32, WeightFormat::kBf16, WeightFormat::kFp8Block, WeightFormat::kNvfp4}) {
    for (const int64_t rows : {1, 15, 16, 17, 32, 33, 47, 48, 130, 301}) {
      const int64_t cols = 16 * (1 + static_cast<int64_t>(rng_.below(30)));
      SCOPED_TRACE(std::string(ops::to_string(format)) + " " + std::to_string(rows) + " x " + std::to_string(cols));
      const testing::RandomWeight weight = testing::random_weight(rng_, format, rows, cols);
      device::Buffer data(static_cast<size_t>(layout.data_bytes(weight.view))),
          scales(static_cast<size_t>(layout.scale_bytes(weight.view)));
      if (data.size() > 0) std::memset(data.data(), 0xFF, data.size());
      if (scales.size() > 0) std::memset(scales.data(), 0xFF, scales.size());
      ops::WeightView packed = weight.view;
      packed.data = data.data(), packed.block_scales = scales.data();
      device::Queue queue(2), one(1);
      layout.pack(weight.view, packed, queue);
      EXPECT_EQ(count_bits(data), count_bits(weight.data)) << "a permutation of bits, and zeros";
      EXPECT_EQ(count_bits(scales), count_bits(weight.scales));
      const device::Buffer data_back(weight.data.size()), scales_back(weight.scales.size());
      ops::WeightView back = weight.view;
      back.data = data_back.data(), back.block_scales = scales_back.data();
      layout.unpack(packed, back, one);
      EXPECT_EQ(std::memcmp(data_back.data(), weight.data.data(), weight.data.size()), 0);
      if (weight.scales.size() > 0) {
        EXPECT_EQ(std::memcmp(scales_back.data(), weight.scales.data(), weight.scales.size()), 0);
      }
    }
  }
}

}  // namespace
}  // namespace tessera
