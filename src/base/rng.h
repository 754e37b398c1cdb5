// SPDX-License-Identifier: Apache-2.0
#pragma once
// Counter-based random numbers: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).
// The same (seed, counter) gives the same bits on every machine and in any order of calls, hence sampling by
// (seed, position) and test data that do not depend on the run.
#include <array>
#include <cstdint>

#include "base/host_device.h"

namespace tessera {

// Four words of (seed, counter).
TESSERA_HOST_DEVICE constexpr void philox(uint64_t seed, uint64_t counter_low, uint64_t counter_high,
                                          uint32_t (&words)[4]) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  uint32_t c0 = static_cast<uint32_t>(counter_low), c1 = static_cast<uint32_t>(counter_low >> 32);
  uint32_t c2 = static_cast<uint32_t>(counter_high), c3 = static_cast<uint32_t>(counter_high >> 32);
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = kMultiplier0 * c0, product1 = kMultiplier1 * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0, c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1, c3 = static_cast<uint32_t>(product0);
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}
std::array<uint32_t, 4> philox(uint64_t seed, uint64_t counter_low, uint64_t counter_high = 0);

// A stream over one seed and stream number, for test data and weights made in memory.
class Rng {
 public:
  explicit Rng(uint64_t seed, uint64_t stream = 0) : seed_(seed), stream_(stream) {}
  uint32_t next_u32();
  uint64_t next_u64() { return static_cast<uint64_t>(next_u32()) << 32 | next_u32(); }
  // Uniform in [0, 1), 24 bits.
  float uniform() { return static_cast<float>(next_u32() >> 8) * 0x1p-24f; }
  // Uniform integer in [0, bound); bound > 0. The bias of the multiply method (< bound / 2^64) is accepted.
  uint64_t below(uint64_t bound);
  // Standard normal (Box-Muller in double, rounded once).
  float normal();

 private:
  uint64_t seed_, stream_, counter_ = 0;
  std::array<uint32_t, 4> block_{};
  int used_ = 4;
};

}  // namespace tessera
