// SPDX-License-Identifier: Apache-2.0
#include "ops/random_fill/random_fill.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/integer_math.h"
#include "numeric/bf16.h"

namespace tessera::ops {

namespace {

using Kind = RandomFill::Kind;

constexpr int64_t kGrain = 1 << 14;  // worth a thread

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kCodes:
      return "codes";
    case Kind::kScales:
      return "scales";
    case Kind::kE4m3:
      return "e4m3";
    case Kind::kNormal:
      return "normal";
  }
  return "?";
}

}  // namespace

std::string RandomFill::Desc::to_string() const {
  return fmt::format("{} {}", name_of(kind), dtype_name(dtype));
}

bool random_fill_reference_supports(const RandomFill::Desc& desc, std::string& why_not) {
  const bool is_float = desc.dtype == DType::kF32 || desc.dtype == DType::kBF16;
  if (desc.kind == Kind::kNormal ? is_float : desc.dtype == DType::kU8) return true;
  why_not = fmt::format("{} of {}", name_of(desc.kind), dtype_name(desc.dtype));
  return false;
}

void random_fill_reference(const RandomFill::Desc& desc, const RandomFill::Args& args, device::Queue& queue) {
  if (desc.kind != Kind::kNormal) {
    uint8_t* out = static_cast<uint8_t*>(args.out);
    queue.parallel_for(ceil_div<int64_t>(args.count, 8), kGrain, [&](int64_t begin, int64_t end) {
      const int64_t whole = std::min(end, args.count / 8);
      for (int64_t i = begin; i < whole; ++i) {
        const uint64_t word = random_bytes(desc.kind, args.seed, i);
        std::memcpy(out + 8 * i, &word, 8);
      }
      for (int64_t k = 8 * whole; k < std::min(8 * end, args.count); ++k) {
        out[k] = static_cast<uint8_t>(random_bytes(desc.kind, args.seed, k / 8) >> (k % 8 * 8));
      }
    });
    return;
  }
  queue.parallel_for(args.count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float value = args.center + args.spread * random_normal(args.seed, i);
      if (desc.dtype == DType::kF32) {
        static_cast<float*>(args.out)[i] = value;
      } else {
        static_cast<uint16_t*>(args.out)[i] = numeric::bf16_from_float(value);
      }
    }
  });
}

}  // namespace tessera::ops
