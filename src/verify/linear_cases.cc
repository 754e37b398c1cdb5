// SPDX-License-Identifier: Apache-2.0
// Linear maps, experts and what stands around them.
#include <algorithm>

#include "base/integer_math.h"
#include "numeric/nvfp4.h"
#include "verify/cases.h"
#include "verify/fills.h"

namespace tessera::verify {

using ops::InputMode;
using ops::WeightFormat;

namespace {

constexpr float kPickingLimit = 4096;  // of gates and ups, of which some are larger
constexpr WeightFormat kFormats[] = {WeightFormat::kF32, WeightFormat::kBf16, WeightFormat::kFp8Block,
                                     WeightFormat::kNvfp4};
constexpr InputMode kModes[] = {InputMode::kF32, InputMode::kA16, InputMode::kA8, InputMode::kA4};

// Where one product is all of a sum, nothing is lost; zeros of both signs are equal.
constexpr double kExact = 1e-10;

DType activation_of(InputMode mode) {
  return mode == InputMode::kF32 ? DType::kF32 : DType::kBF16;
}

// Which experts each token goes to: ascending, distinct.
std::vector<int32_t> random_choices(Rng& rng, int64_t tokens, int64_t num_experts, int64_t top_k,
                                    Form form = Form::kUsual) {
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < tokens; ++t) {
    if (form == Form::kOneExpert && t > 0) {
      for (int64_t i = 0; i < top_k; ++i) ids.push_back(ids[static_cast<size_t>(i)]);
      continue;
    }
    // Of every second one, or of all.
    const int64_t step = form == Form::kNoneOfSome ? 2 : 1;
    std::vector<int32_t> all(static_cast<size_t>(ceil_div(num_experts, step)));
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int32_t>(static_cast<int64_t>(i) * step);
    for (size_t i = 0; i < static_cast<size_t>(top_k); ++i) std::swap(all[i], all[i + rng.below(all.size() - i)]);
    std::sort(all.begin(), all.begin() + top_k);
    ids.insert(ids.end(), all.begin(), all.begin() + top_k);
  }
  return ids;
}

}  // namespace

std::vector<Spec<ops::Linear>> specs_of(ops::Linear, bool is_quick) {
  std::vector<Spec<ops::Linear>> specs;
  for (const WeightFormat format : kFormats) {
    for (const InputMode mode : kModes) {
      if (mode == InputMode::kA4 && format != WeightFormat::kNvfp4) continue;
      const DType activation = activation_of(mode);
      add_small<ops::Linear>(specs, {.in = 208,
                                     .out = 67,
                                     .groups = 2,
                                     .format = format,
                                     .input = mode,
                                     .activation = activation,
                                     .output = activation});
      // Odd widths where the format has them, and an FP32 output.
      add_small<ops::Linear>(specs, {.in = format == WeightFormat::kNvfp4 ? 48 : 131,
                                     .out = 5,
                                     .format = format,
                                     .input = mode,
                                     .activation = activation,
                                     .output = DType::kF32});
      // More than one chunk of a tensor-core kernel, and a ragged last one.
      add_small<ops::Linear>(
          specs,
          {.in = 1168, .out = 33, .format = format, .input = mode, .activation = activation, .output = activation});
    }
  }
  // More tokens, in a4: tiles of many, pairs of blocks, and what is rounded to the place where it is multiplied.
  ops::Linear::Desc many{
      .in = 336, .out = 300, .format = WeightFormat::kNvfp4, .input = InputMode::kA4, .output = DType::kF32};
  for (const int64_t tokens : {90, 141}) specs.push_back({many, tokens, Fill::kMixed, 0, "many"});
  for (const int64_t tokens : {5, 90, 141})
    specs.push_back({many, tokens, Fill::kNormal, 0, "picking", Form::kPicking});
  if (is_quick) return specs;
  // Rows for the tiles of more than 190 multiprocessors, columns for several stages; tiles of 192 tokens by pairs of
  // blocks and of 256 by two pairs, and, where a group has no rows for two, of 256 by one.
  many.in = 1040, many.out = 24600;
  for (const int64_t tokens : {128, 150, 250}) {
    specs.push_back({many, tokens, Fill::kMixed, 0, "many"});
    specs.push_back({many, tokens, Fill::kNormal, 0, "picking", Form::kPicking});
  }
  ops::Linear::Desc narrow = many;
  narrow.in = 272, narrow.out = 256, narrow.groups = 64;
  specs.push_back({narrow, 250, Fill::kMixed, 0, "many"});
  struct Matrix {
    const char* label;
    int64_t in, out, groups;
    WeightFormat format;
    DType output;
  };
  constexpr auto kFp8 = WeightFormat::kFp8Block, kFp4 = WeightFormat::kNvfp4, kBf16 = WeightFormat::kBf16;
  const Matrix matrices[] = {
      {"Flash wq_a", 4096, 1024, 1, kFp8, DType::kBF16},
      {"Flash wq_b", 1024, 32768, 1, kFp8, DType::kBF16},
      {"Flash wkv", 4096, 512, 1, kFp8, DType::kBF16},
      {"Flash wo_a", 4096, 1024, 8, kFp8, DType::kBF16},
      {"Flash wo_b", 8192, 4096, 1, kFp8, DType::kBF16},
      {"Flash indexer wq_b", 1024, 8192, 1, kFp8, DType::kBF16},
      {"Flash indexer weights_proj", 4096, 64, 1, kBf16, DType::kBF16},
      {"Flash compressor wkv, ratio 4", 4096, 1024, 1, kBf16, DType::kF32},
      {"Flash compressor wkv, ratio 128", 4096, 512, 1, kBf16, DType::kF32},
      {"Flash router", 4096, 256, 1, kBf16, DType::kF32},
      {"Flash shared expert w1", 4096, 2048, 1, kFp8, DType::kBF16},
      {"Flash head, 8,192 of the vocabulary", 4096, 8192, 1, kBf16, DType::kF32},
      {"Flash wq_a", 4096, 1024, 1, kFp4, DType::kBF16},
      {"Flash wo_a", 4096, 1024, 8, kFp4, DType::kBF16},
      {"Flash shared expert w1", 4096, 2048, 1, kFp4, DType::kBF16},
      {"Flash shared expert w2", 2048, 4096, 1, kFp4, DType::kBF16},
  };
  for (const Matrix& m : matrices) {
    const ops::Linear::Desc desc{.in = m.in, .out = m.out, .groups = m.groups, .format = m.format, .output = m.output};
    add_published<ops::Linear>(specs, desc, m.label);
  }
  for (const InputMode mode : {InputMode::kA8, InputMode::kA4}) {
    add_published<ops::Linear>(specs, {.in = 4096, .out = 2048, .format = kFp4, .input = mode},
                               "Flash shared expert w1");
  }
  return specs;
}

Case<ops::Linear> make_case(Rng& rng, const Spec<ops::Linear>& spec) {
  const ops::Linear::Desc& desc = spec.desc;
  const int64_t in = desc.groups * desc.in, out = desc.groups * desc.out;
  Case<ops::Linear> one;
  one.args.x = one.arrays.tensor(filled(rng, spec.fill, spec.num_tokens, in), desc.activation, {spec.num_tokens, in});
  const bool is_picking = spec.form == Form::kPicking;
  one.args.weight =
      is_picking ? one.arrays.picking_weight(rng, out, desc.in) : one.arrays.weight(rng, desc.format, out, desc.in);
  one.args.y = is_picking ? one.arrays.output("y", desc.output, {spec.num_tokens, out}, Rule::kNorm, kExact)
                          : one.arrays.output("y", desc.output, {spec.num_tokens, out}, Rule::kValues);
  one.args.num_tokens = spec.num_tokens;
  return one;
}

std::vector<Spec<ops::MoeExperts>> specs_of(ops::MoeExperts, bool is_quick) {
  std::vector<Spec<ops::MoeExperts>> specs;
  for (const WeightFormat format : kFormats) {
    for (const InputMode mode : kModes) {
      if (mode == InputMode::kA4 && format != WeightFormat::kNvfp4) continue;
      // Experts 1 to 4 of 6: other ranks have the rest.
      add_small<ops::MoeExperts>(specs, {.hidden = 48,
                                         .inner = 80,
                                         .first_expert = 1,
                                         .num_local = 4,
                                         .top_k = 3,
                                         .format = format,
                                         .input = mode,
                                         .swiglu_limit = 10,
                                         .activation = activation_of(mode)});
    }
  }
  // More slots, in a4: tiles of many, several of an expert, experts that have all or none.
  ops::MoeExperts::Desc many{.hidden = 336,
                             .inner = 160,
                             .num_local = 4,
                             .top_k = 2,
                             .format = WeightFormat::kNvfp4,
                             .input = InputMode::kA4,
                             .swiglu_limit = 10};
  const auto add_many = [&](const char* label, int64_t tokens) {
    specs.push_back({many, tokens, Fill::kMixed, 0, label});
    specs.push_back({many, tokens, Fill::kMixed, 0, label, Form::kOneExpert});
    specs.push_back({many, 30, Fill::kMixed, 0, label, Form::kNoneOfSome});
  };
  add_many("many", 110);
  many.swiglu_limit = 0;
  add_many("many, no clamp", 45);
  // A tile of few and of many; more slots of an expert than a tile has.
  many.swiglu_limit = kPickingLimit;
  for (const int64_t tokens : {5, 60, 250})
    specs.push_back({many, tokens, Fill::kNormal, 0, "picking", Form::kPicking});
  if (is_quick) return specs;
  ops::MoeExperts::Desc flash_a4{.hidden = 4096,
                                 .inner = 2048,
                                 .num_local = 8,
                                 .top_k = 6,
                                 .format = WeightFormat::kNvfp4,
                                 .input = InputMode::kA4,
                                 .swiglu_limit = 10};
  specs.push_back({flash_a4, 60, Fill::kMixed, 0, "Flash, 8 of 256 experts"});
  specs.push_back({flash_a4, 3, Fill::kNormal, 0, "Flash, 8 of 256 experts"});
  flash_a4.swiglu_limit = kPickingLimit;
  for (const int64_t tokens : {4, 60})
    specs.push_back({flash_a4, tokens, Fill::kNormal, 0, "Flash, 8 of 256 experts", Form::kPicking});
  ops::MoeExperts::Desc flash{.hidden = 4096, .inner = 2048, .num_local = 8, .top_k = 6, .swiglu_limit = 10};
  add_published<ops::MoeExperts>(specs, flash, "Flash, 8 of 256 experts");
  flash.num_local = 6, flash.top_k = 1;
  specs.push_back({flash, 17, Fill::kNormal, 0, "Flash, 6 of 256 experts"});
  return specs;
}

namespace {

// Values that a4 keeps: codes times a power of two for each block, of both signs, none zero: from 1/8 to 6.
std::vector<float> exact_in_a4(Rng& rng, int64_t rows, int64_t cols) {
  constexpr float kCodes[] = {0.5f, 1, 1.5f, 2, 3, 4, 6};
  std::vector<float> values;
  for (int64_t i = 0; i < rows * cols; ++i) {
    const int64_t block = i % cols / numeric::kNvfp4Block;
    const int exponent = block == 0 ? 0 : -static_cast<int>((i / cols + block) % 3);
    // The first of a row is its largest, which makes 1 of the first scale's 448 parts.
    const float code = i % cols == 0 ? 6 : kCodes[rng.below(std::size(kCodes))];
    values.push_back(std::ldexp(rng.below(2) == 0 ? code : -code, exponent));
  }
  return values;
}

// One value a row: gates from 18 on or from -18 down, ups alike, some beyond the clamp.
ops::WeightView picking_of_experts(Arrays& arrays, Rng& rng, int64_t rows, int64_t cols, float tensor_scale) {
  constexpr uint8_t kOne = 0x38, kFour = 0x48;  // E4M3
  ops::WeightView weight = arrays.picking_weight(rng, rows, cols, kOne, kFour - 1);
  weight.tensor_scale = tensor_scale;
  return weight;
}

}  // namespace

ops::MoeExperts::Args expert_inputs(Rng& rng, const Spec<ops::MoeExperts>& spec, Arrays& arrays) {
  const ops::MoeExperts::Desc& desc = spec.desc;
  const int64_t tokens = spec.num_tokens, num_experts = desc.num_local + 2 * desc.first_expert;
  const bool is_picking = spec.form == Form::kPicking;
  ops::MoeExperts::Args args;
  args.x =
      arrays.tensor(is_picking ? exact_in_a4(rng, tokens, desc.hidden) : filled(rng, spec.fill, tokens, desc.hidden),
                    desc.activation, {tokens, desc.hidden});
  args.experts = arrays.array(random_choices(rng, tokens, num_experts, desc.top_k, spec.form));
  std::vector<float> routing;
  for (int64_t i = 0; i < tokens * desc.top_k; ++i) routing.push_back(rng.uniform());
  args.routing = arrays.array(routing);
  std::vector<ops::WeightView> w1, w3, w2;
  for (int64_t e = 0; e < desc.num_local; ++e) {
    if (is_picking) {  // the least product of codes and scales is 1/16
      w1.push_back(picking_of_experts(arrays, rng, desc.inner, desc.hidden, 300));
      w3.push_back(picking_of_experts(arrays, rng, desc.inner, desc.hidden, 100));
      w2.push_back(arrays.picking_weight(rng, desc.hidden, desc.inner));
      continue;
    }
    // Gate and up have different tensor scales.
    w1.push_back(arrays.weight(rng, desc.format, desc.inner, desc.hidden));
    w3.push_back(arrays.weight(rng, desc.format, desc.inner, desc.hidden));
    w2.push_back(arrays.weight(rng, desc.format, desc.hidden, desc.inner));
  }
  args.w1 = arrays.array(w1), args.w3 = arrays.array(w3), args.w2 = arrays.array(w2);
  args.num_tokens = tokens;
  return args;
}

Case<ops::MoeExperts> make_case(Rng& rng, const Spec<ops::MoeExperts>& spec) {
  const ops::MoeExperts::Desc& desc = spec.desc;
  const bool is_picking = spec.form == Form::kPicking;
  Case<ops::MoeExperts> one;
  one.args = expert_inputs(rng, spec, one.arrays);
  // A rounding of the inner values that falls the other way moves an output by one step of a quantised format.
  const bool is_quantised = desc.input == InputMode::kA8 || desc.input == InputMode::kA4;
  const double bound = is_picking ? kExact : is_quantised ? 0.03 : 0;
  one.args.out = one.arrays.output("out", desc.activation, {spec.num_tokens, desc.top_k, desc.hidden},
                                   is_quantised ? Rule::kNorm : Rule::kRows, bound);
  return one;
}

std::vector<Spec<ops::SwiGlu>> specs_of(ops::SwiGlu, bool is_quick) {
  std::vector<Spec<ops::SwiGlu>> specs;
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    add_small<ops::SwiGlu>(specs, {.inner = 77, .limit = 10, .activation = dtype});
    add_small<ops::SwiGlu>(specs, {.inner = 160, .limit = 0, .activation = dtype});
  }
  if (!is_quick) add_published<ops::SwiGlu>(specs, {.inner = 2048, .limit = 10}, "Flash");
  return specs;
}

Case<ops::SwiGlu> make_case(Rng& rng, const Spec<ops::SwiGlu>& spec) {
  const Shape shape = {spec.num_tokens, spec.desc.inner};
  Case<ops::SwiGlu> one;
  const auto input = [&] {
    return one.arrays.tensor(filled(rng, spec.fill, shape[0], shape[1]), spec.desc.activation, shape);
  };
  one.args.gate = input(), one.args.up = input();
  one.args.out = one.arrays.output("out", spec.desc.activation, shape, Rule::kValues);
  one.args.num_tokens = spec.num_tokens;
  return one;
}

std::vector<Spec<ops::MoeCombine>> specs_of(ops::MoeCombine, bool is_quick) {
  std::vector<Spec<ops::MoeCombine>> specs;
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    add_small<ops::MoeCombine>(specs, {.hidden = 77, .top_k = 3, .activation = dtype});
  }
  if (!is_quick) add_published<ops::MoeCombine>(specs, {.hidden = 4096, .top_k = 6}, "Flash");
  return specs;
}

Case<ops::MoeCombine> make_case(Rng& rng, const Spec<ops::MoeCombine>& spec) {
  const ops::MoeCombine::Desc& desc = spec.desc;
  const int64_t tokens = spec.num_tokens;
  Case<ops::MoeCombine> one;
  one.args.routed = one.arrays.tensor(filled(rng, spec.fill, tokens * desc.top_k, desc.hidden), desc.activation,
                                      {tokens, desc.top_k, desc.hidden});
  one.args.shared =
      one.arrays.tensor(filled(rng, spec.fill, tokens, desc.hidden), desc.activation, {tokens, desc.hidden});
  one.args.out = one.arrays.output("out", desc.activation, {tokens, desc.hidden}, Rule::kBits);
  one.args.num_tokens = tokens;
  return one;
}

std::vector<Spec<ops::Router>> specs_of(ops::Router, bool is_quick) {
  std::vector<Spec<ops::Router>> specs;
  for (const bool is_hashed : {false, true}) {
    add_small<ops::Router>(specs, {.num_experts = 37, .top_k = 5, .is_hashed = is_hashed, .scaling = 1.5f});
    if (is_quick) continue;
    add_published<ops::Router>(specs, {.num_experts = 256, .top_k = 6, .is_hashed = is_hashed, .scaling = 1.5f},
                               is_hashed ? "Flash, hashed" : "Flash");
  }
  return specs;
}

Case<ops::Router> make_case(Rng& rng, const Spec<ops::Router>& spec) {
  const ops::Router::Desc& desc = spec.desc;
  const int64_t tokens = spec.num_tokens;
  constexpr int64_t kVocab = 50;
  Case<ops::Router> one;
  one.args.logits = one.arrays.array(filled(rng, spec.fill, tokens, desc.num_experts));
  if (desc.is_hashed) {
    one.args.table = one.arrays.array(random_choices(rng, kVocab, desc.num_experts, desc.top_k));
    std::vector<int32_t> ids;
    for (int64_t t = 0; t < tokens; ++t) ids.push_back(static_cast<int32_t>(rng.below(kVocab)));
    one.args.token_ids = one.arrays.array(ids);
  } else {
    one.args.bias = one.arrays.array(normal_values(rng, 1, desc.num_experts));
  }
  one.args.experts = one.arrays.output<int32_t>("experts", DType::kI32, {tokens, desc.top_k}, Rule::kBits);
  one.args.weights = one.arrays.output<float>("weights", DType::kF32, {tokens, desc.top_k}, Rule::kNorm);
  one.args.num_tokens = tokens;
  return one;
}

}  // namespace tessera::verify
