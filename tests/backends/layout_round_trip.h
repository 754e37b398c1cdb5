// SPDX-License-Identifier: Apache-2.0
#pragma once
// What every packed layout promises: each bit has a place, padding is zero, and unpacking restores all.
#include <gtest/gtest.h>

#include <cstring>

#include "ops/packed_layout.h"
#include "testing/op_harness.h"

namespace tessera::testing {

inline int64_t count_bits(const device::Buffer& buffer) {
  int64_t count = 0;
  for (size_t i = 0; i < buffer.size(); ++i) count += __builtin_popcount(buffer.as<uint8_t>()[i]);
  return count;
}

inline void expect_round_trip(const ops::PackedLayout& layout, const RandomWeight& weight) {
  const device::Buffer data(static_cast<size_t>(layout.data_bytes(weight.view))),
      scales(static_cast<size_t>(layout.scale_bytes(weight.view)));
  for (const device::Buffer* buffer : {&data, &scales}) {
    if (buffer->size() > 0) std::memset(buffer->data(), 0xFF, buffer->size());
  }
  ops::WeightView packed = weight.view;
  packed.data = data.data(), packed.block_scales = scales.data();
  device::Queue queue(2), one(1);
  layout.pack(weight.view, packed, queue);
  // Scales that fold are kept as factors.
  EXPECT_EQ(count_bits(data) + (weight.view.scales_fold ? 0 : count_bits(scales)),
            count_bits(weight.data) + (weight.view.scales_fold ? 0 : count_bits(weight.scales)))
      << "a permutation of bits, and zeros";
  const device::Buffer data_back(weight.data.size()), scales_back(weight.scales.size());
  ops::WeightView back = weight.view;
  back.data = data_back.data(), back.block_scales = scales_back.data();
  layout.unpack(packed, back, one);
  EXPECT_EQ(std::memcmp(data_back.data(), weight.data.data(), weight.data.size()), 0);
  if (weight.scales.size() == 0) return;
  EXPECT_EQ(std::memcmp(scales_back.data(), weight.scales.data(), weight.scales.size()), 0);
}

}  // namespace tessera::testing
