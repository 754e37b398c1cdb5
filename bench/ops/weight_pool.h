// SPDX-License-Identifier: Apache-2.0
#pragma once
// Random codes and scales from one pool; a weight is a window into it, so that successive runs read other bytes.
#include "device/buffer.h"
#include "ops/weight_view.h"

namespace tessera::bench {

class WeightPool {
 public:
  WeightPool(int64_t bytes, device::MemorySpace& memory);
  static int64_t memory_bytes(int64_t bytes) { return 2 * bytes + bytes / 8 + kBlockScaleBytes; }
  const char* codes() const { return codes_.as<char>(); }
  int64_t bytes() const { return static_cast<int64_t>(codes_.size()); }
  // The `index`-th weight of that shape, at most bytes() long. Any bytes are a valid packed layout too.
  ops::WeightView weight(ops::WeightFormat format, int64_t rows, int64_t cols, int64_t index) const;

 private:
  static constexpr int64_t kBlockScaleBytes = 1 << 20;

  device::Buffer codes_, scales_, block_scales_, values_;
};

}  // namespace tessera::bench
