// SPDX-License-Identifier: Apache-2.0
#pragma once
// Counter-based random numbers: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).
// The same (seed, counter) gives the same bits on every machine and in any order of calls, hence sampling by
// (seed, position) and test data that do not depend on the run.
#include <array>
#include <cstdint>

namespace tessera {

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
