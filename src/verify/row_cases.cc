// SPDX-License-Identifier: Apache-2.0
// What happens to rows between the large products: embedding, norms, positions, residual streams, sampling.
#include <cmath>
#include <limits>

#include "verify/cases.h"
#include "verify/fills.h"

namespace tessera::verify {

namespace {

constexpr DType kActivations[] = {DType::kBF16, DType::kF32};

// [tokens, streams, width] activations.
template <class Op>
TensorView activations(Case<Op>& one, Rng& rng, const Spec<Op>& spec, int64_t streams, int64_t width) {
  return one.arrays.tensor(filled(rng, spec.fill, spec.num_tokens * streams, width), spec.desc.activation,
                           {spec.num_tokens, streams, width});
}

template <class Op>
std::vector<Spec<Op>> hyper_connection_specs(bool is_quick) {
  std::vector<Spec<Op>> specs;
  for (const DType dtype : kActivations) {
    for (const int64_t hidden : {56, 256}) add_small<Op>(specs, {.hidden = hidden, .activation = dtype});
  }
  if (!is_quick) add_published<Op>(specs, {.hidden = 4096}, "Flash");
  return specs;
}

}  // namespace

std::vector<Spec<ops::Embedding>> specs_of(ops::Embedding, bool is_quick) {
  std::vector<Spec<ops::Embedding>> specs;
  for (const DType dtype : kActivations) {
    add_small<ops::Embedding>(specs, {.vocab = 7, .hidden = 77, .weight = DType::kBF16, .activation = dtype});
    add_small<ops::Embedding>(specs, {.vocab = 7, .hidden = 77, .weight = DType::kF32, .activation = dtype});
  }
  if (!is_quick) add_published<ops::Embedding>(specs, {.vocab = 512, .hidden = 4096}, "Flash, 512 of the vocabulary");
  return specs;
}

Case<ops::Embedding> make_case(Rng& rng, const Spec<ops::Embedding>& spec) {
  const ops::Embedding::Desc& desc = spec.desc;
  Case<ops::Embedding> one;
  one.args.weight =
      one.arrays.tensor(filled(rng, spec.fill, desc.vocab, desc.hidden), desc.weight, {desc.vocab, desc.hidden});
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < spec.num_tokens; ++t) {
    ids.push_back(static_cast<int32_t>(rng.below(static_cast<uint64_t>(desc.vocab))));
  }
  one.args.ids = one.arrays.array(ids);
  one.args.out = one.arrays.output("out", desc.activation, {spec.num_tokens, desc.streams, desc.hidden}, Rule::kBits);
  one.args.num_tokens = spec.num_tokens;
  return one;
}

std::vector<Spec<ops::RmsNorm>> specs_of(ops::RmsNorm, bool is_quick) {
  std::vector<Spec<ops::RmsNorm>> specs;
  for (const DType dtype : kActivations) {
    for (const int64_t width : {1, 77, 272}) add_small<ops::RmsNorm>(specs, {.width = width, .activation = dtype});
  }
  if (is_quick) return specs;
  add_published<ops::RmsNorm>(specs, {.width = 4096}, "Flash");
  add_published<ops::RmsNorm>(specs, {.width = 1024}, "Flash, queries before wq_b");
  add_published<ops::RmsNorm>(specs, {.width = 512}, "Flash, heads without a weight", 1, 64 * 17);
  return specs;
}

Case<ops::RmsNorm> make_case(Rng& rng, const Spec<ops::RmsNorm>& spec) {
  const Shape shape = {spec.num_tokens, spec.desc.width};
  Case<ops::RmsNorm> one;
  one.args.x = one.arrays.tensor(filled(rng, spec.fill, shape[0], shape[1]), spec.desc.activation, shape);
  if (spec.context == 0) {  // 1: without a weight
    one.args.weight = one.arrays.tensor(normal_values(rng, 1, shape[1]), DType::kBF16, {shape[1]});
  }
  one.args.out = one.arrays.output("out", spec.desc.activation, shape, Rule::kBits);
  one.args.num_rows = spec.num_tokens;
  return one;
}

std::vector<Spec<ops::Rope>> specs_of(ops::Rope, bool is_quick) {
  std::vector<Spec<ops::Rope>> specs;
  for (const bool is_inverse : {false, true}) {
    for (const DType dtype : kActivations) {
      add_small<ops::Rope>(specs,
                           {.vectors = 3, .width = 72, .rope_dim = 34, .is_inverse = is_inverse, .activation = dtype});
    }
    if (is_quick) continue;
    add_published<ops::Rope>(specs, {.vectors = 64, .width = 512, .rope_dim = 64, .is_inverse = is_inverse},
                             is_inverse ? "Flash, heads' outputs" : "Flash, queries");
    add_published<ops::Rope>(specs, {.width = 512, .rope_dim = 64, .is_inverse = is_inverse}, "Flash, keys");
    add_published<ops::Rope>(specs, {.vectors = 64, .width = 128, .rope_dim = 64, .is_inverse = is_inverse},
                             "Flash, indexer's queries");
  }
  return specs;
}

Case<ops::Rope> make_case(Rng& rng, const Spec<ops::Rope>& spec) {
  const ops::Rope::Desc& desc = spec.desc;
  Case<ops::Rope> one;
  one.args.x = activations(one, rng, spec, desc.vectors, desc.width);
  one.arrays.updates("x", one.args.x, Rule::kValues);
  std::vector<int64_t> positions;
  for (int64_t t = 0; t < spec.num_tokens; ++t) positions.push_back(static_cast<int64_t>(rng.below(1 << 20)));
  one.args.positions = one.arrays.array(positions);
  const ops::Yarn yarn;
  one.args.frequencies = one.arrays.array(ops::rope_frequencies(desc.rope_dim, 160000, &yarn));
  one.args.num_tokens = spec.num_tokens;
  return one;
}

std::vector<Spec<ops::MhcPre>> specs_of(ops::MhcPre, bool is_quick) {
  std::vector<Spec<ops::MhcPre>> specs = hyper_connection_specs<ops::MhcPre>(is_quick);
  // More turns than published models have, and a smaller number that keeps coefficients from zero.
  for (const DType dtype : kActivations) {
    specs.push_back({{.hidden = 57, .sinkhorn_iterations = 24, .activation = dtype}, 5});
    specs.push_back({{.hidden = 57, .hc_eps = 1e-9f, .activation = dtype}, 5});
  }
  return specs;
}

Case<ops::MhcPre> make_case(Rng& rng, const Spec<ops::MhcPre>& spec) {
  const int64_t tokens = spec.num_tokens, hidden = spec.desc.hidden;
  Case<ops::MhcPre> one;
  one.args.x = activations(one, rng, spec, ops::kHcStreams, hidden);
  add_mixing(one.args, one.arrays, rng, hidden, ops::kHcCoefficients, 3);
  one.args.y = one.arrays.output("y", spec.desc.activation, {tokens, hidden}, Rule::kValues);
  one.args.post = one.arrays.output<float>("post", DType::kF32, {tokens, 4}, Rule::kNorm);
  one.args.comb = one.arrays.output<float>("comb", DType::kF32, {tokens, 4, 4}, Rule::kNorm);
  one.args.num_tokens = tokens;
  return one;
}

std::vector<Spec<ops::MhcPost>> specs_of(ops::MhcPost, bool is_quick) {
  return hyper_connection_specs<ops::MhcPost>(is_quick);
}

Case<ops::MhcPost> make_case(Rng& rng, const Spec<ops::MhcPost>& spec) {
  const int64_t tokens = spec.num_tokens;
  Case<ops::MhcPost> one;
  one.args.x = activations(one, rng, spec, ops::kHcStreams, spec.desc.hidden);
  one.args.o = activations(one, rng, spec, 1, spec.desc.hidden);
  one.args.post = one.arrays.array(normal_values(rng, tokens, 4));
  one.args.comb = one.arrays.array(normal_values(rng, tokens, 16));
  // In place, as layers do.
  one.args.out = one.args.x;
  one.arrays.updates("out", one.args.out, Rule::kBits);
  one.args.num_tokens = tokens;
  return one;
}

std::vector<Spec<ops::MhcHead>> specs_of(ops::MhcHead, bool is_quick) {
  return hyper_connection_specs<ops::MhcHead>(is_quick);
}

Case<ops::MhcHead> make_case(Rng& rng, const Spec<ops::MhcHead>& spec) {
  const int64_t tokens = spec.num_tokens, hidden = spec.desc.hidden;
  Case<ops::MhcHead> one;
  one.args.x = activations(one, rng, spec, ops::kHcStreams, hidden);
  std::vector<int32_t> rows;
  for (int64_t t = 0; t < tokens; ++t) rows.push_back(static_cast<int32_t>(rng.below(static_cast<uint64_t>(tokens))));
  one.args.rows = one.arrays.array(rows);
  add_mixing(one.args, one.arrays, rng, hidden, 4, 1);
  one.args.h = one.arrays.output("h", spec.desc.activation, {tokens, hidden}, Rule::kValues);
  one.args.num_rows = tokens;
  return one;
}

std::vector<Spec<ops::StreamAdd>> specs_of(ops::StreamAdd, bool is_quick) {
  std::vector<Spec<ops::StreamAdd>> specs;
  for (const DType dtype : kActivations) add_small<ops::StreamAdd>(specs, {.hidden = 77, .activation = dtype});
  if (!is_quick) add_published<ops::StreamAdd>(specs, {.hidden = 4096}, "Flash");
  return specs;
}

Case<ops::StreamAdd> make_case(Rng& rng, const Spec<ops::StreamAdd>& spec) {
  const ops::StreamAdd::Desc& desc = spec.desc;
  Case<ops::StreamAdd> one;
  one.args.z = activations(one, rng, spec, desc.streams, desc.hidden);
  one.args.e = activations(one, rng, spec, 1, desc.hidden);
  one.args.out = one.arrays.output("out", desc.activation, {spec.num_tokens, desc.streams, desc.hidden}, Rule::kBits);
  one.args.num_tokens = spec.num_tokens;
  return one;
}

std::vector<Spec<ops::Hadamard>> specs_of(ops::Hadamard, bool is_quick) {
  std::vector<Spec<ops::Hadamard>> specs;
  for (const DType dtype : kActivations) {
    add_small<ops::Hadamard>(specs, {.width = 2, .activation = dtype});
    for (const bool is_fp4 : {false, true}) {
      add_small<ops::Hadamard>(specs, {.width = 32, .is_fp4 = is_fp4, .activation = dtype});
    }
  }
  if (is_quick) return specs;
  for (const bool is_fp4 : {false, true}) {
    add_published<ops::Hadamard>(specs, {.width = 128, .is_fp4 = is_fp4}, "Flash, indexer's heads", 0, 64 * 17);
  }
  return specs;
}

Case<ops::Hadamard> make_case(Rng& rng, const Spec<ops::Hadamard>& spec) {
  Case<ops::Hadamard> one;
  one.args.x = activations(one, rng, spec, 1, spec.desc.width);
  one.arrays.updates("x", one.args.x, Rule::kBits);
  one.args.num_rows = spec.num_tokens;
  return one;
}

std::vector<Spec<ops::FiniteCheck>> specs_of(ops::FiniteCheck, bool is_quick) {
  std::vector<Spec<ops::FiniteCheck>> specs;
  for (const int64_t width : {1, 77}) add_small<ops::FiniteCheck>(specs, {.width = width});
  if (!is_quick) add_published<ops::FiniteCheck>(specs, {.width = 129280}, "Flash, logits");
  return specs;
}

Case<ops::FiniteCheck> make_case(Rng& rng, const Spec<ops::FiniteCheck>& spec) {
  const float inf = std::numeric_limits<float>::infinity(), bad[] = {std::nanf(""), inf, -inf};
  std::vector<float> values = filled(rng, spec.fill, spec.num_tokens, spec.desc.width);
  for (int64_t r = 0; r < spec.num_tokens; ++r) {
    for (uint64_t n = rng.below(3); n > 0; --n) {
      const int64_t at = static_cast<int64_t>(rng.below(static_cast<uint64_t>(spec.desc.width)));
      values[static_cast<size_t>(r * spec.desc.width + at)] = bad[rng.below(3)];
    }
  }
  Case<ops::FiniteCheck> one;
  one.args.values = one.arrays.array(values);
  one.args.first_bad = one.arrays.output<int32_t>("first_bad", DType::kI32, {spec.num_tokens}, Rule::kBits);
  one.args.num_rows = spec.num_tokens;
  return one;
}

// `context` counts through ways to sample; the last, with bias and penalties, is of one row. From the sixth on there
// are masks: of every third token, of one, and of none.
constexpr int64_t kWaysToSample = 9;

std::vector<Spec<ops::Sample>> specs_of(ops::Sample, bool is_quick) {
  std::vector<Spec<ops::Sample>> specs;
  for (int64_t way = 0; way < kWaysToSample; ++way) {
    const int64_t rows = way + 1 < kWaysToSample ? 3 : 1;
    for (const Fill fill : kFills) specs.push_back({{.vocab = 301}, rows, fill, way});
    if (!is_quick) specs.push_back({{.vocab = 129280}, rows, Fill::kNormal, way, "Flash"});
  }
  return specs;
}

Case<ops::Sample> make_case(Rng& rng, const Spec<ops::Sample>& spec) {
  const int64_t vocab = spec.desc.vocab;
  Case<ops::Sample> one;
  const TensorView logits =
      one.arrays.tensor(filled(rng, spec.fill, spec.num_tokens, vocab), DType::kF32, {spec.num_tokens, vocab});
  one.args.logits = logits.as<float>();
  one.arrays.clobbers("logits", logits);
  std::vector<ops::SampleRow> rows;
  for (int64_t i = 0; i < spec.num_tokens; ++i) {
    ops::SampleRow& row = rows.emplace_back();
    row.params.temperature = spec.context == 0 ? 0 : 0.5f + rng.uniform();
    if (spec.context == 2) row.params.top_k = 20;
    if (spec.context == 3) row.params.top_p = 0.9f;
    if (spec.context == 4) row.params.min_p = 0.1f;
    row.params.seed = rng.next_u64();
    row.position = rng.below(1 << 20);
    row.logit_row = static_cast<int32_t>(spec.num_tokens - 1 - i);
    if (spec.context >= 5 && i != 1) row.mask_row = static_cast<int32_t>(i == 0 ? 1 : 0);
  }
  if (spec.context >= 5) {
    std::vector<uint32_t> masks(static_cast<size_t>(2 * ops::mask_words(vocab)));
    const auto allow = [&](int64_t mask, int64_t id) {
      masks[static_cast<size_t>(mask * ops::mask_words(vocab) + id / 32)] |= uint32_t{1} << (id % 32);
    };
    for (int64_t id = 0; id < vocab; ++id) {
      if (id % 3 == 1) allow(1, id);
    }
    if (spec.context != 7) allow(0, static_cast<int64_t>(rng.below(static_cast<uint64_t>(vocab))));
    one.args.masks = one.arrays.array(masks);
  }
  if (spec.context == 6) rows[0].params.temperature = 0;
  if (spec.context + 1 == kWaysToSample) {
    ops::SamplingParams& params = rows[0].params;
    params.repetition_penalty = 1.3f, params.frequency_penalty = 0.2f, params.presence_penalty = 0.4f;
    std::vector<int32_t> counts;
    for (int64_t i = 0; i < vocab; ++i) counts.push_back(static_cast<int32_t>(rng.below(3)));
    one.args.counts = one.arrays.array(counts);
    one.args.bias_ids = one.arrays.array(std::vector<int32_t>{3, 200});
    one.args.bias_values = one.arrays.array(std::vector<float>{2.5f, -1.0f});
    one.args.num_bias = 2;
  }
  one.args.rows = one.arrays.array(rows);
  one.args.num_rows = spec.num_tokens;
  one.args.tokens = one.arrays.output<int32_t>("tokens", DType::kI32, {spec.num_tokens}, Rule::kBits);
  return one;
}

}  // namespace tessera::verify
