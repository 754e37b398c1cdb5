// SPDX-License-Identifier: Apache-2.0
// Packed weights: every bit has a place, unpacking restores them, padding is zero.
#include "backends/cpu_common/panel_layout.h"

#include <gtest/gtest.h>

#include "backends/layout_round_trip.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

using ops::WeightFormat;

class PanelLayoutTest : public testing::RandomTest {};

TEST_F(PanelLayoutTest, UnpackRestoresEveryBit) {
  const ops::PackedLayout& layout = *backends::cpu_common::panel_layout();
  for (const auto format : {WeightFormat::kF32, WeightFormat::kBf16, WeightFormat::kFp8Block, WeightFormat::kNvfp4}) {
    for (const int64_t rows : {1, 15, 16, 17, 32, 33, 47, 48, 130, 301}) {
      const int64_t cols = 16 * (1 + static_cast<int64_t>(rng_.below(30)));
      SCOPED_TRACE(std::string(ops::to_string(format)) + " " + std::to_string(rows) + " x " + std::to_string(cols));
      const testing::RandomWeight weight = testing::random_weight(rng_, format, rows, cols);
      testing::expect_round_trip(layout, weight);
    }
  }
}

}  // namespace
}  // namespace tessera
