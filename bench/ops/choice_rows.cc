// SPDX-License-Identifier: Apache-2.0
// Token ids in, token ids out: embedding, router, sampling.
#include "bench/ops/op_bench.h"

namespace tessera::bench {

namespace {

void embedding(OpBench& bench, const std::string& name, const model::Config& c) {
  // As much of the table as the pool holds.
  const int64_t hidden = c.hidden_size, vocab = std::min(c.vocab_size, bench.pool().bytes() / (2 * hidden));
  const ops::Embedding::Desc desc{.vocab = vocab, .hidden = hidden};
  const ops::WeightView table = bench.pool().weight(ops::WeightFormat::kBf16, vocab, hidden, 0);
  struct Operands {
    std::vector<int32_t> ids;
    device::Tensor out;
  };
  bench.rows<ops::Embedding>(name, desc, [&](const auto& op, int64_t tokens, void*) -> OpBench::Case {
    constexpr int64_t kRuns = 64;
    const auto o = std::make_shared<Operands>();
    for (int64_t i = 0; i < kRuns * tokens; ++i) {
      o->ids.push_back(static_cast<int32_t>(bench.rng().below(static_cast<uint64_t>(vocab))));
    }
    o->out = device::Tensor(DType::kBF16, {tokens, ops::kHcStreams, hidden});
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
    std::vector<float> logits, bias, weights;
    std::vector<int32_t> experts;
  };
  const ops::Router::Desc desc{.num_experts = c.num_experts,
                               .top_k = c.experts_per_token,
                               .scaling = static_cast<float>(c.routed_scaling_factor)};
  bench.rows<ops::Router>(name, desc, [&](const auto& op, int64_t tokens, void*) -> OpBench::Case {
    const auto o = std::make_shared<Operands>();
    o->logits = bench.floats(tokens * c.num_experts, 2);
    o->bias = bench.floats(c.num_experts, 0.1f);
    o->weights.resize(static_cast<size_t>(tokens * c.experts_per_token));
    o->experts.resize(o->weights.size());
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

void sample(OpBench& bench, const std::string& name, const model::Config& c, const ops::SamplingParams& params) {
  struct Operands {
    std::vector<float> logits;
    int32_t token = 0;
  };
  // One row at a time, whatever --tokens says.
  bench.rows<ops::Sample>(name, {.vocab = c.vocab_size}, {1},
                          [&](const auto& op, int64_t, void* workspace) -> OpBench::Case {
                            const auto o = std::make_shared<Operands>();
                            // As peaked as a language model: a few likely tokens over a broad tail.
                            o->logits = bench.floats(c.vocab_size, 2);
                            for (int i = 0; i < 20; ++i) {
                              o->logits[bench.rng().below(o->logits.size())] = 10 + 3 * bench.rng().normal();
                            }
                            return {{.tokens = 1, .bytes = c.vocab_size * 4}, [=, &bench](int64_t run) {
                                      op.run({.logits = o->logits.data(),
                                              .params = params,
                                              .position = static_cast<uint64_t>(run),
                                              .token = &o->token,
                                              .workspace = workspace},
                                             bench.queue());
                                    }};
                          });
}

}  // namespace

void bench_choices(OpBench& bench, const std::string& name, const model::Config& c) {
  embedding(bench, name, c);
  router(bench, name, c);
  sample(bench, name + " greedy", c, {});
  sample(bench, name + " temperature 1", c, {.temperature = 1, .seed = 3});
  sample(bench, name + " top-k 50, top-p 0.95", c, {.temperature = 1, .top_p = 0.95f, .top_k = 50, .seed = 3});
}

}  // namespace tessera::bench
