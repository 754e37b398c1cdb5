// SPDX-License-Identifier: Apache-2.0
// The ops between the linear maps that read and write rows of tokens.
#include <algorithm>

#include "bench/ops/op_bench.h"

namespace tessera::bench {

namespace {

void rms_norm(OpBench& bench, const std::string& name, int64_t vectors, int64_t width, bool has_weight) {
  const OpBench::Footprint footprint{.fixed = width * 2, .per_token = vectors * width * 2};
  bench.rows<ops::RmsNorm>(
      name, {.width = width}, footprint, [&](const auto& op, int64_t tokens, void*) -> OpBench::Case {
        const auto x = std::make_shared<device::Tensor>(bench.activations(tokens * vectors, width));
        const auto weight = std::make_shared<device::Tensor>(bench.activations(1, width));
        return {{.tokens = tokens, .bytes = 4 * tokens * vectors * width, .flops = 4 * tokens * vectors * width},
                [=, &bench](int64_t) {
                  op.run({.x = *x,
                          .weight = has_weight ? weight->view() : TensorView{},
                          .out = *x,
                          .num_rows = tokens * vectors},
                         bench.queue());
                }};
      });
}

void rope(OpBench& bench, const std::string& name, const model::Config& c, int64_t vectors, int64_t width) {
  const ops::Rope::Desc desc{.vectors = vectors, .width = width, .rope_dim = c.rope_dim};
  struct Operands {
    device::Tensor x;
    Placed<int64_t> positions;
    Placed<float> frequencies;
  };
  bench.rows<ops::Rope>(name, desc, {.per_token = vectors * width * 2 + 8},
                        [&](const auto& op, int64_t tokens, void*) -> OpBench::Case {
                          const auto o = std::make_shared<Operands>();
                          o->x = bench.activations(tokens, vectors * width);
                          o->positions = bench.place(OpBench::positions(4096, tokens));
                          o->frequencies = bench.place(ops::rope_frequencies(c.rope_dim, c.rope_theta, nullptr));
                          const int64_t values = tokens * vectors * c.rope_dim;
                          return {{.tokens = tokens, .bytes = 4 * values, .flops = 3 * values}, [=, &bench](int64_t) {
                                    op.run({.x = o->x,
                                            .positions = o->positions.data(),
                                            .frequencies = o->frequencies.data(),
                                            .num_tokens = tokens},
                                           bench.queue());
                                  }};
                        });
}

struct Mixing {
  device::Tensor x, y;
  Placed<float> fn, base, scale, post, comb;
};

std::shared_ptr<Mixing> mixing(OpBench& bench, int64_t hidden, int64_t tokens) {
  constexpr int64_t kS = ops::kHcStreams;
  const auto o = std::make_shared<Mixing>();
  o->x = bench.activations(tokens, kS * hidden);
  o->y = bench.activations(tokens, hidden);
  o->fn = bench.place(bench.floats(ops::kHcCoefficients * kS * hidden, 0.01f));
  o->base = bench.place(bench.floats(ops::kHcCoefficients, 1));
  o->scale = bench.place(std::vector<float>(3, 0.5f));
  o->post = bench.place(std::vector<float>(static_cast<size_t>(tokens * kS), 0.5f));
  o->comb = bench.place(std::vector<float>(static_cast<size_t>(tokens * kS * kS), 0.25f));
  return o;
}

void hyper_connections(OpBench& bench, const std::string& name, const model::Config& c) {
  constexpr int64_t kS = ops::kHcStreams;
  const int64_t hidden = c.hidden_size, width = kS * hidden;
  const ops::MhcDesc desc{.hidden = hidden};
  const OpBench::Footprint footprint{.fixed = ops::kHcCoefficients * (width + 1) * 4,
                                     .per_token = (width + hidden) * 2 + (kS + kS * kS) * 4};
  bench.rows<ops::MhcPre>(name + " read", desc, footprint,
                          [&](const auto& op, int64_t tokens, void* workspace) -> OpBench::Case {
                            const auto o = mixing(bench, hidden, tokens);
                            return {{.tokens = tokens,
                                     .bytes = ops::kHcCoefficients * width * 4 + tokens * (width + hidden) * 2,
                                     .flops = 2 * tokens * width * (ops::kHcCoefficients + 2)},
                                    [=, &bench](int64_t) {
                                      op.run({.x = o->x,
                                              .fn = o->fn.data(),
                                              .base = o->base.data(),
                                              .scale = o->scale.data(),
                                              .y = o->y,
                                              .post = o->post.data(),
                                              .comb = o->comb.data(),
                                              .num_tokens = tokens,
                                              .workspace = workspace},
                                             bench.queue());
                                    }};
                          });
  bench.rows<ops::MhcPost>(
      name + " write", desc, footprint, [&](const auto& op, int64_t tokens, void*) -> OpBench::Case {
        const auto o = mixing(bench, hidden, tokens);
        return {{.tokens = tokens, .bytes = tokens * (2 * width + hidden) * 2, .flops = 2 * tokens * width * (kS + 1)},
                [=, &bench](int64_t) {
                  op.run({.x = o->x,
                          .o = o->y,
                          .post = o->post.data(),
                          .comb = o->comb.data(),
                          .out = o->x,
                          .num_tokens = tokens},
                         bench.queue());
                }};
      });
  bench.rows<ops::MhcHead>(name + " head", desc, footprint,
                           [&](const auto& op, int64_t tokens, void* workspace) -> OpBench::Case {
                             const auto o = mixing(bench, hidden, tokens);
                             return {{.tokens = tokens,
                                      .bytes = kS * width * 4 + tokens * (width + hidden) * 2,
                                      .flops = 2 * tokens * width * (kS + 2)},
                                     [=, &bench](int64_t) {
                                       op.run({.x = o->x,
                                               .fn = o->fn.data(),
                                               .base = o->base.data(),
                                               .scale = o->scale.data(),
                                               .h = o->y,
                                               .num_rows = tokens,
                                               .workspace = workspace},
                                              bench.queue());
                                     }};
                           });
}

void additions(OpBench& bench, const std::string& name, const model::Config& c) {
  struct Operands {
    device::Tensor a, b, out;
  };
  const int64_t hidden = c.hidden_size, inner = c.expert_inner, top_k = c.experts_per_token;
  constexpr int64_t kS = ops::kHcStreams;
  const ops::SwiGlu::Desc swiglu{.inner = inner, .limit = static_cast<float>(c.swiglu_limit)};
  bench.rows<ops::SwiGlu>(
      name, swiglu, {.per_token = 6 * inner}, [&](const auto& op, int64_t tokens, void*) -> OpBench::Case {
        const auto o = std::make_shared<Operands>();
        o->a = bench.activations(tokens, inner), o->b = bench.activations(tokens, inner);
        o->out = bench.activations(tokens, inner);
        return {{.tokens = tokens, .bytes = 6 * tokens * inner}, [=, &bench](int64_t) {
                  op.run({.gate = o->a, .up = o->b, .out = o->out, .num_tokens = tokens}, bench.queue());
                }};
      });
  const ops::MoeCombine::Desc combine{.hidden = hidden, .top_k = top_k};
  bench.rows<ops::MoeCombine>(
      name, combine, {.per_token = 2 * hidden * (top_k + 2)},
      [&](const auto& op, int64_t tokens, void*) -> OpBench::Case {
        const auto o = std::make_shared<Operands>();
        o->a = bench.activations(tokens, top_k * hidden), o->b = bench.activations(tokens, hidden);
        o->out = bench.activations(tokens, hidden);
        return {{.tokens = tokens, .bytes = 2 * tokens * hidden * (top_k + 2), .flops = tokens * hidden * top_k},
                [=, &bench](int64_t) {
                  op.run({.routed = o->a, .shared = o->b, .out = o->out, .num_tokens = tokens}, bench.queue());
                }};
      });
  bench.rows<ops::StreamAdd>(
      name, {.hidden = hidden}, {.per_token = 2 * hidden * (2 * kS + 1)},
      [&](const auto& op, int64_t tokens, void*) -> OpBench::Case {
        const auto o = std::make_shared<Operands>();
        o->a = bench.activations(tokens, kS * hidden), o->b = bench.activations(tokens, hidden);
        o->out = bench.activations(tokens, kS * hidden);
        return {{.tokens = tokens, .bytes = 2 * tokens * hidden * (2 * kS + 1), .flops = tokens * hidden * kS},
                [=, &bench](int64_t) {
                  op.run({.z = o->a, .e = o->b, .out = o->out, .num_tokens = tokens}, bench.queue());
                }};
      });
}

}  // namespace

void bench_rows(OpBench& bench, const std::string& name, const model::Config& c) {
  rms_norm(bench, name + " layer", 1, c.hidden_size, true);
  rms_norm(bench, name + " query heads", c.num_heads, c.head_dim, false);
  rope(bench, name + " queries", c, c.num_heads, c.head_dim);
  rope(bench, name + " key", c, 1, c.head_dim);
  hyper_connections(bench, name, c);
  additions(bench, name, c);
}

}  // namespace tessera::bench
