// SPDX-License-Identifier: Apache-2.0
#include "base/rng.h"

#include <cmath>
#include <numbers>

namespace tessera {

std::array<uint32_t, 4> philox(uint64_t seed, uint64_t counter_low, uint64_t counter_high) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  std::array<uint32_t, 4> c = {static_cast<uint32_t>(counter_low), static_cast<uint32_t>(counter_low >> 32),
                               static_cast<uint32_t>(counter_high), static_cast<uint32_t>(counter_high >> 32)};
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = kMultiplier0 * c[0], product1 = kMultiplier1 * c[2];
    c = {static_cast<uint32_t>(product1 >> 32) ^ c[1] ^ key0, static_cast<uint32_t>(product1),
         static_cast<uint32_t>(product0 >> 32) ^ c[3] ^ key1, static_cast<uint32_t>(product0)};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return c;
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
