// SPDX-License-Identifier: Apache-2.0
#include "base/rng.h"

#include <cmath>
#include <numbers>

namespace tessera {

std::array<uint32_t, 4> philox(uint64_t seed, uint64_t counter_low, uint64_t counter_high) {
  uint32_t words[4];
  philox(seed, counter_low, counter_high, words);
  return std::to_array(words);
}

uint32_t Rng::next_u32() {
  if (used_ == 4) {
    block_ = philox(seed_, counter_++, stream_);
    used_ = 0;
  }
  return block_[static_cast<size_t>(used_++)];
}

uint64_t Rng::below(uint64_t bound) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>(static_cast<Wide>(next_u64()) * bound >> 64);
}

float Rng::normal() {
  const double u = (static_cast<double>(next_u32()) + 1) * 0x1p-32;  // in (0, 1]: the logarithm stays finite
  const double v = static_cast<double>(next_u32()) * 0x1p-32;
  return static_cast<float>(std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v));
}

}  // namespace tessera
