// SPDX-License-Identifier: Apache-2.0
// Calls that make weights: numbers made up, and matrices quantised.
#include <limits>

#include "verify/cases.h"

namespace tessera::verify {

namespace {

using ops::QuantizeNvfp4;
using ops::RandomFill;
using Kind = RandomFill::Kind;
using Weights = QuantizeNvfp4::Rule;

constexpr int64_t kBad = 1;  // as a spec's context: with NaN and infinity

}  // namespace

// Tokens are values.
std::vector<Spec<RandomFill>> specs_of(RandomFill, bool is_quick) {
  std::vector<Spec<RandomFill>> specs;
  for (const RandomFill::Desc& desc : {RandomFill::Desc{Kind::kCodes, DType::kU8},
                                       {Kind::kScales, DType::kU8},
                                       {Kind::kNormal, DType::kF32},
                                       {Kind::kNormal, DType::kBF16}}) {
    for (const int64_t count : {1, 7, 8, 1021}) specs.push_back({desc, count});
    if (!is_quick) specs.push_back({desc, 4096 * 512, Fill::kNormal, 0, "Flash, w1"});
  }
  return specs;
}

Case<RandomFill> make_case(Rng& rng, const Spec<RandomFill>& spec) {
  Case<RandomFill> one;
  one.args.out = one.arrays.output("out", spec.desc.dtype, {spec.num_tokens}, Rule::kBits).data;
  one.args.count = spec.num_tokens;
  one.args.seed = rng.next_u64();
  one.args.center = rng.normal(), one.args.spread = rng.uniform();
  return one;
}

std::vector<Spec<QuantizeNvfp4>> specs_of(QuantizeNvfp4, bool is_quick) {
  std::vector<Spec<QuantizeNvfp4>> specs;
  for (const Weights rule : {Weights::kRows, Weights::kTensor, Weights::kFourOverSix}) {
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      add_small<QuantizeNvfp4>(specs, {rule, dtype});
      for (const int64_t rows : kTokenCounts) specs.push_back({{rule, dtype}, rows, Fill::kMixed, kBad});
      if (!is_quick) specs.push_back({{rule, dtype}, 2048, Fill::kMixed, 0, "2048 rows"});
    }
  }
  return specs;
}

Case<QuantizeNvfp4> make_case(Rng& rng, const Spec<QuantizeNvfp4>& spec) {
  const int64_t rows = spec.num_tokens, width = rows > 100 ? 4096 : 16 * (1 + static_cast<int64_t>(rng.below(20)));
  std::vector<float> values = filled(rng, spec.fill, rows, width);
  if (spec.context == kBad) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    const float bad[] = {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN(), kInfinity,
                         -kInfinity};
    values[rng.below(values.size())] = bad[rng.below(4)];
  }
  Case<QuantizeNvfp4> one;
  one.args.x = one.arrays.tensor(values, spec.desc.dtype, {rows, width});
  const auto bytes = [&](const char* name, int64_t count) {
    return one.arrays.output<uint8_t>(name, DType::kU8, {count}, Rule::kBits);
  };
  one.args.codes = bytes("codes", rows * width / 2);
  one.args.scales = bytes("scales", rows * width / 16);
  // As bytes: a NaN is one of the results.
  one.args.globals = reinterpret_cast<float*>(bytes("globals", 4 * (spec.desc.rule == Weights::kRows ? rows : 1)));
  return one;
}

}  // namespace tessera::verify
