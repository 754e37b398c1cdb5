// SPDX-License-Identifier: Apache-2.0
// Token ids in, token ids out: embedding, router, the check of logits, sampling.
#include "bench/ops/op_bench.h"

namespace tessera::bench {

namespace {

void embedding(OpBench& bench, const std::string& name, const model::Config& c) {
  // As much of the table as the pool holds.
  const int64_t hidden = c.hidden_size, vocab = std::min(c.vocab_size, bench.pool().bytes() / (2 * hidden));
  const ops::Embedding::Desc desc{.vocab = vocab, .hidden = hidden};
  const ops::WeightView table = bench.pool().weight(ops::WeightFormat::kBf16, vocab, hidden, 0);
  struct Operands {
    Placed<int32_t> ids;
    device::Tensor out;
  };
  constexpr int64_t kRuns = 64;
  const OpBench::Footprint footprint{.per_token = kRuns * 8 + ops::kHcStreams * hidden * 2};  // ids grow by doubling
  bench.rows<ops::Embedding>(name, desc, footprint, [&](const auto& op, int64_t tokens, void*) -> OpBench::Case {
    const auto o = std::make_shared<Operands>();
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < kRuns * tokens; ++i) {
      ids.push_back(static_cast<int32_t>(bench.rng().below(static_cast<uint64_t>(vocab))));
    }
    o->ids = bench.place(ids);
    o->out = bench.zeros(DType::kBF16, {tokens, ops::kHcStreams, hidden});
    return {{.tokens = tokens, .bytes = 2 * tokens * hidden * (1 + ops::kHcStreams), .residence = Residence::kMemory},
            [=, &bench](int64_t run) {
              op.run({.weight = {const_cast<void*>(table.data), DType::kBF16, {vocab, hidden}},
                      .ids = o->ids.data() + run / 2 % kRuns * tokens,
                      .num_tokens = tokens,
                      .out = o->out},
                     bench.queue());
            }};
  });
}

void router(OpBench& bench, const std::string& name, const model::Config& c) {
  struct Operands {
    Placed<float> logits, bias, weights;
    Placed<int32_t> experts;
  };
  const ops::Router::Desc desc{.num_experts = c.num_experts,
                               .top_k = c.experts_per_token,
                               .scaling = static_cast<float>(c.routed_scaling_factor)};
  const OpBench::Footprint footprint{.fixed = c.num_experts * 4,
                                     .per_token = (c.num_experts + 2 * c.experts_per_token) * 4};
  bench.rows<ops::Router>(name, desc, footprint, [&](const auto& op, int64_t tokens, void*) -> OpBench::Case {
    const auto o = std::make_shared<Operands>();
    o->logits = bench.place(bench.floats(tokens * c.num_experts, 2));
    o->bias = bench.place(bench.floats(c.num_experts, 0.1f));
    o->weights = bench.place(std::vector<float>(static_cast<size_t>(tokens * c.experts_per_token)));
    o->experts = bench.place(std::vector<int32_t>(static_cast<size_t>(tokens * c.experts_per_token)));
    return {{.tokens = tokens, .bytes = tokens * (c.num_experts + 2 * c.experts_per_token) * 4}, [=, &bench](int64_t) {
              op.run({.logits = o->logits.data(),
                      .bias = o->bias.data(),
                      .experts = o->experts.data(),
                      .weights = o->weights.data(),
                      .num_tokens = tokens},
                     bench.queue());
            }};
  });
}

void finite_check(OpBench& bench, const std::string& name, const model::Config& c) {
  struct Operands {
    device::Tensor values;
    Placed<int32_t> first_bad;
  };
  bench.rows<ops::FiniteCheck>(
      name, {.width = c.vocab_size}, {.per_token = c.vocab_size * 4 + 4},
      [&](const auto& op, int64_t tokens, void*) -> OpBench::Case {
        const auto o = std::make_shared<Operands>();
        o->values = bench.zeros(DType::kF32, {tokens, c.vocab_size});
        o->first_bad = bench.place(std::vector<int32_t>(static_cast<size_t>(tokens)));
        return {{.tokens = tokens, .bytes = tokens * c.vocab_size * 4}, [=, &bench](int64_t) {
                  op.run(
                      {.values = o->values.template as<float>(), .first_bad = o->first_bad.data(), .num_rows = tokens},
                      bench.queue());
                }};
      });
}

// As peaked as a language model's rows usually are: a few likely tokens over a broad tail; or the tail alone, as where
// anything may follow.
enum class Rows { kPeaked, kFlat };

void sample(OpBench& bench, const std::string& name, const model::Config& c, const ops::SamplingParams& params,
            Rows kind = Rows::kPeaked) {
  struct Operands {
    Placed<float> logits;
    Placed<ops::SampleRow> rows;
    Placed<int32_t> tokens;
  };
  constexpr int64_t kPositions = 64;  // drawn in turn
  // Rows of logits that a step ends with, whatever --tokens says.
  bench.rows<ops::Sample>(name, {.vocab = c.vocab_size}, {.per_token = c.vocab_size * 4}, {1, 32, 256},
                          [&](const auto& op, int64_t count, void* workspace) -> OpBench::Case {
                            const auto o = std::make_shared<Operands>();
                            std::vector<float> logits = bench.floats(count * c.vocab_size, 2);
                            for (int64_t i = 0; kind == Rows::kPeaked && i < 20 * count; ++i) {
                              logits[bench.rng().below(logits.size())] = 10 + 3 * bench.rng().normal();
                            }
                            std::vector<ops::SampleRow> rows;
                            for (int64_t i = 0; i < count * kPositions; ++i) {
                              rows.push_back({params, static_cast<uint64_t>(i), static_cast<int32_t>(i % count)});
                            }
                            o->logits = bench.place(logits);
                            o->rows = bench.place(rows);
                            o->tokens = bench.place(std::vector<int32_t>(static_cast<size_t>(count)));
                            return {{.tokens = count, .bytes = count * c.vocab_size * 4}, [=, &bench](int64_t run) {
                                      op.run({.logits = o->logits.data(),
                                              .rows = o->rows.data() + run % kPositions * count,
                                              .num_rows = count,
                                              .tokens = o->tokens.data(),
                                              .workspace = workspace},
                                             bench.queue());
                                    }};
                          });
}

}  // namespace

void bench_choices(OpBench& bench, const std::string& name, const model::Config& c) {
  embedding(bench, name, c);
  router(bench, name, c);
  finite_check(bench, name, c);
  sample(bench, name + " greedy", c, {});
  sample(bench, name + " temperature 1", c, {.temperature = 1, .seed = 3});
  sample(bench, name + " temperature 1, flat", c, {.temperature = 1, .seed = 3}, Rows::kFlat);
  sample(bench, name + " temperature 1, top-p 0.95, flat", c, {.temperature = 1, .top_p = 0.95f, .seed = 3},
         Rows::kFlat);
  sample(bench, name + " top-k 50, top-p 0.95", c, {.temperature = 1, .top_p = 0.95f, .top_k = 50, .seed = 3});
}

}  // namespace tessera::bench
