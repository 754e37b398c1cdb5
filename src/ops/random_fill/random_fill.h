// SPDX-License-Identifier: Apache-2.0
#pragma once
// Makes numbers up where they will lie: weights of models that exist for measuring only. A value depends on (seed,
// index) alone, so the bytes are the same on every machine and for any number of threads.
//   bits     word i is the i-th output of SplitMix64 from `seed`; a byte array has the words' bytes, lowest first
//   kCodes   those bytes: two random E2M1 codes each
//   kScales  of each byte the five low bits, plus 0x28: E4M3 0.25 to 3.75
//   kE4m3    those bytes without bit 6: E4M3 -1.875 to 1.875
//   kNormal  value i = center + spread * sqrt(3) * (sum of word i's four 16-bit parts / 2^16 - 2), in FP32, rounded to
//            `dtype`: near enough to normal, at most 3.5 spreads off
// Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (SplitMix64).
#include <cstdint>
#include <string>

#include "base/host_device.h"
#include "ops/variant.h"
#include "tensor/dtype.h"

namespace tessera::ops {

struct RandomFill {
  static constexpr const char* kName = "random_fill";
  enum class Kind : uint8_t { kCodes, kScales, kE4m3, kNormal };
  struct Desc {
    Kind kind = Kind::kCodes;
    DType dtype = DType::kU8;  // F32 or BF16 with kNormal, else U8
    std::string to_string() const;
  };
  struct Args {
    void* out = nullptr;  // [count], aligned to 8 bytes
    int64_t count = 0;
    uint64_t seed = 0;
    float center = 0, spread = 1;  // kNormal
  };
};

// Word `index` of the bits.
TESSERA_HOST_DEVICE constexpr uint64_t random_word(uint64_t seed, int64_t index) {
  uint64_t z = seed + static_cast<uint64_t>(index + 1) * 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

// Eight bytes of kCodes, kScales or kE4m3.
TESSERA_HOST_DEVICE constexpr uint64_t random_bytes(RandomFill::Kind kind, uint64_t seed, int64_t index) {
  const uint64_t word = random_word(seed, index);
  if (kind == RandomFill::Kind::kE4m3) return word & 0xBFBFBFBFBFBFBFBF;
  return kind == RandomFill::Kind::kCodes ? word : (word & 0x1F1F1F1F1F1F1F1F) + 0x2828282828282828;
}

// A value of kNormal with center 0 and spread 1.
TESSERA_HOST_DEVICE constexpr float random_normal(uint64_t seed, int64_t index) {
  const uint64_t bits = random_word(seed, index);
  const uint64_t sum = (bits & 0xFFFF) + (bits >> 16 & 0xFFFF) + (bits >> 32 & 0xFFFF) + (bits >> 48);
  return (static_cast<float>(sum) * 0x1p-16f - 2) * 1.7320508f;
}

bool random_fill_reference_supports(const RandomFill::Desc& desc, std::string& why_not);
void random_fill_reference(const RandomFill::Desc& desc, const RandomFill::Args& args, device::Queue& queue);

}  // namespace tessera::ops
