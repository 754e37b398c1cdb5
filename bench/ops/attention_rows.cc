// SPDX-License-Identifier: Apache-2.0
// Attention, the indexer, and what writes caches.
#include <algorithm>
#include <cmath>

#include "bench/ops/op_bench.h"

namespace tessera::bench {

namespace {

using ops::EntryLayout;

// `count` entries of random vectors.
device::Buffer random_cache(Rng& rng, const EntryLayout& layout, int64_t count) {
  device::Buffer cache(static_cast<size_t>(count * layout.entry_bytes()));
  std::vector<float> key(static_cast<size_t>(layout.width));
  for (int64_t i = 0; i < count; ++i) {
    for (float& value : key) value = rng.normal();
    ops::encode_entry(layout, key.data(), cache.as<uint8_t>() + i * layout.entry_bytes());
  }
  return cache;
}

struct AttentionOperands {
  device::Tensor q, out;
  device::Buffer cache;
  Placed<int64_t> positions;
  Placed<int32_t> counts, selected;
  Placed<float> sink;
};

constexpr int kLog2PageKeys = 6;
constexpr int64_t kPageKeys = int64_t{1} << kLog2PageKeys;

struct ScoreOperands {
  device::Tensor queries, weights;
  device::Buffer keys;
  Placed<const uint8_t*> pages;
  Placed<int32_t> places, counts, selected;
  Placed<float> scores;
};

// Most tokens that a layer scores at once.
std::vector<int64_t> scored_at_once(const Options& options) {
  constexpr int64_t kMost = 16;
  std::vector<int64_t> counts;
  for (const int64_t tokens : options.tokens) {
    if (counts.empty() || tokens < kMost || counts.back() < kMost) counts.push_back(std::min(tokens, kMost));
  }
  return counts;
}

void compressor(OpBench& bench, const std::string& name, int64_t ratio, int64_t width) {
  struct Operands {
    Placed<float> values, gates, ape, state;
    device::Tensor entries;
    Placed<ops::CompressorSlice> slices;
  };
  const ops::CompressorPool::Desc desc{.ratio = ratio, .width = width};
  const OpBench::Footprint footprint{.fixed = (ratio * desc.row_width() + desc.state_floats()) * 4,
                                     .per_token = 2 * desc.row_width() * 4 + width * 2};
  bench.rows<ops::CompressorPool>(name, desc, footprint, [&](const auto& op, int64_t tokens, void*) -> OpBench::Case {
    const auto o = std::make_shared<Operands>();
    o->values = bench.place(bench.floats(tokens * desc.row_width(), 1));
    o->gates = bench.place(bench.floats(tokens * desc.row_width(), 1));
    o->ape = bench.place(bench.floats(ratio * desc.row_width(), 1));
    std::vector<float> state(static_cast<size_t>(desc.state_floats()));
    ops::compressor_reset(desc, state.data());
    o->state = bench.place(state);
    // The last of them completes an entry.
    const int64_t first = ops::entries_completed(ratio, 0, tokens) * ratio + ratio - tokens % ratio;
    const ops::CompressorSlice slice{.num_rows = static_cast<int32_t>(tokens), .first_position = first};
    o->slices = bench.place(std::vector{slice});
    o->entries = bench.zeros(DType::kBF16, {ops::most_completed(ratio, tokens), width});
    return {{.tokens = tokens, .bytes = 2 * tokens * desc.row_width() * 4}, [=, &bench](int64_t) {
              op.run({.values = o->values.data(),
                      .gates = o->gates.data(),
                      .ape = o->ape.data(),
                      .state = o->state.data(),
                      .slices = o->slices.data(),
                      .num_slices = 1,
                      .entries = o->entries},
                     bench.queue());
            }};
  });
}

void hadamard(OpBench& bench, const std::string& name, int64_t vectors, int64_t width, bool is_fp4) {
  const ops::Hadamard::Desc desc{.width = width, .is_fp4 = is_fp4};
  bench.rows<ops::Hadamard>(
      name, desc, {.per_token = vectors * width * 2}, [&](const auto& op, int64_t tokens, void*) -> OpBench::Case {
        const auto x = std::make_shared<device::Tensor>(bench.activations(tokens * vectors, width));
        int64_t steps = 0;
        for (int64_t size = width; size > 1; size /= 2) ++steps;
        return {{.tokens = tokens, .bytes = 4 * tokens * vectors * width, .flops = tokens * vectors * width * steps},
                [=, &bench](int64_t) { op.run({.x = *x, .num_rows = tokens * vectors}, bench.queue()); }};
      });
}

void cache_write(OpBench& bench, const std::string& name, const EntryLayout& layout) {
  struct Operands {
    device::Tensor rows;
    device::Buffer cache;
    Placed<int64_t> slots;
  };
  const OpBench::Footprint footprint{.per_token = layout.width * 2 + layout.entry_bytes() + 8};
  bench.rows<ops::CacheWrite>(
      name, {.layout = layout}, footprint, [&](const auto& op, int64_t tokens, void*) -> OpBench::Case {
        const auto o = std::make_shared<Operands>();
        o->rows = bench.activations(tokens, layout.width);
        o->cache = device::Buffer(static_cast<size_t>(tokens * layout.entry_bytes()), bench.memory());
        o->slots = bench.place(OpBench::positions(0, tokens));
        return {{.tokens = tokens, .bytes = tokens * (2 * layout.width + layout.entry_bytes())}, [=, &bench](int64_t) {
                  op.run({.rows = o->rows,
                          .slots = o->slots.data(),
                          .cache = o->cache.template as<uint8_t>(),
                          .num_rows = tokens},
                         bench.queue());
                }};
      });
}

}  // namespace

void attention_rows(OpBench& bench, const std::string& name, const model::Config& c, int64_t entries,
                    const TokenCounts& token_counts) {
  const int64_t heads = c.num_heads, width = c.head_dim, window = c.sliding_window;
  const EntryLayout layout = ops::kv_entry_layout({}, width, c.rope_dim);
  const ops::Attention::Desc desc{.heads = heads,
                                  .head_dim = width,
                                  .window = window,
                                  .scale = static_cast<float>(1 / std::sqrt(static_cast<double>(width))),
                                  .layout = layout};
  const OpBench::Footprint footprint{
      .fixed = (window + 4 * entries) * layout.entry_bytes(),
      .per_token = layout.entry_bytes() + heads * width * 4 + entries * 8 + 12,  // the list grows by doubling
  };
  bench.rows<ops::Attention>(
      name + " " + std::to_string(window) + " + " + std::to_string(entries), desc, footprint, token_counts,
      [&](const auto& op, int64_t tokens, void* workspace) -> OpBench::Case {
        const auto o = std::make_shared<AttentionOperands>();
        const int64_t num_entries = 4 * entries, slots = window + tokens, keys = window + entries;
        o->cache = bench.place(random_cache(bench.rng(), layout, slots + num_entries));
        o->positions = bench.place(OpBench::positions(std::max(4 * num_entries, window), tokens));
        o->counts = bench.place(std::vector<int32_t>(static_cast<size_t>(tokens), static_cast<int32_t>(entries)));
        std::vector<int32_t> selected;
        for (int64_t t = 0; t < tokens; ++t) {
          for (int64_t i = 0; i < entries; ++i) selected.push_back(static_cast<int32_t>(4 * i + (i + t) % 4));
        }
        o->selected = bench.place(selected);
        o->sink = bench.place(std::vector<float>(static_cast<size_t>(heads)));
        o->q = bench.activations(tokens, heads * width);
        o->out = bench.zeros(DType::kBF16, {tokens, heads, width});
        return {{.tokens = tokens,
                 .bytes = tokens * keys * layout.entry_bytes(),
                 .flops = 4 * tokens * keys * heads * width},
                [=, &bench](int64_t) {
                  // A window's layer has no other cache, and kernels choose by that.
                  const uint8_t* all = o->cache.template as<const uint8_t>();
                  const uint8_t* compressed = entries == 0 ? nullptr : all + slots * layout.entry_bytes();
                  op.run({.q = o->q,
                          .positions = o->positions.data(),
                          .window_cache = all,
                          .window_slots = slots,
                          .entry_cache = compressed,
                          .num_entries = o->counts.data(),
                          .selected = o->selected.data(),
                          .selected_stride = entries,
                          .sink = o->sink.data(),
                          .out = o->out,
                          .num_tokens = tokens,
                          .workspace = workspace},
                         bench.queue());
                }};
      });
}

void index_score_rows(OpBench& bench, const std::string& name, const model::Config& c, int64_t entries,
                      const TokenCounts& token_counts) {
  const int64_t heads = c.index_num_heads, width = c.index_head_dim;
  const EntryLayout layout = ops::index_entry_layout({}, width);
  const ops::IndexScores::Desc desc{.heads = heads, .width = width, .keys = layout};
  const OpBench::Footprint footprint{.fixed = entries * layout.entry_bytes(),
                                     .per_token = heads * (width + 1) * 2 + 4 + entries * 4};
  bench.rows<ops::IndexScores>(
      name + " " + std::to_string(entries) + " keys", desc, footprint, token_counts,
      [&](const auto& op, int64_t tokens, void*) -> OpBench::Case {
        const auto o = std::make_shared<ScoreOperands>();
        // In pages, as a model's caches have them.
        const int64_t num_pages = ceil_div(entries, kPageKeys);
        o->keys = bench.place(random_cache(bench.rng(), layout, num_pages * kPageKeys));
        std::vector<const uint8_t*> pages;
        for (int64_t n = 0; n < num_pages; ++n) {
          pages.push_back(o->keys.template as<const uint8_t>() + n * kPageKeys * layout.entry_bytes());
        }
        o->pages = bench.place(pages);
        o->places = bench.place(std::vector<int32_t>(static_cast<size_t>(tokens)));
        o->queries = bench.activations(tokens, heads * width);
        o->weights = bench.activations(tokens, heads);
        o->counts = bench.place(std::vector<int32_t>(static_cast<size_t>(tokens), static_cast<int32_t>(entries)));
        o->scores = bench.place(std::vector<float>(static_cast<size_t>(tokens * entries)));
        return {
            {.tokens = tokens, .bytes = entries * layout.entry_bytes(), .flops = 2 * tokens * entries * heads * width},
            [=, &bench](int64_t) {
              op.run({.queries = o->queries,
                      .weights = o->weights,
                      .keys = {o->pages.data(), num_pages, o->places.data(), 0, kLog2PageKeys},
                      .counts = o->counts.data(),
                      .stride = entries,
                      .scores = o->scores.data(),
                      .num_tokens = tokens},
                     bench.queue());
            }};
      });
}

void top_k_rows(OpBench& bench, const std::string& name, const model::Config& c, int64_t entries,
                const TokenCounts& token_counts) {
  const OpBench::Footprint footprint{.per_token = (entries + 1 + c.index_topk) * 4};
  bench.rows<ops::TopK>(
      name + " of " + std::to_string(entries), {.k = c.index_topk}, footprint, token_counts,
      [&](const auto& op, int64_t tokens, void* workspace) -> OpBench::Case {
        const auto o = std::make_shared<ScoreOperands>();
        o->scores = bench.place(bench.floats(tokens * entries, 1));
        o->counts = bench.place(std::vector<int32_t>(static_cast<size_t>(tokens), static_cast<int32_t>(entries)));
        o->selected = bench.place(std::vector<int32_t>(static_cast<size_t>(tokens * c.index_topk)));
        return {{.tokens = tokens, .bytes = tokens * entries * 4}, [=, &bench](int64_t) {
                  op.run({.scores = o->scores.data(),
                          .stride = entries,
                          .counts = o->counts.data(),
                          .selected = o->selected.data(),
                          .num_tokens = tokens,
                          .workspace = workspace},
                         bench.queue());
                }};
      });
}

void bench_attention(OpBench& bench, const std::string& name, const model::Config& c) {
  constexpr int64_t kEntries = 8192;  // of 32K tokens
  const TokenCounts& tokens = bench.options().tokens;
  const TokenCounts scored = scored_at_once(bench.options());
  attention_rows(bench, name, c, c.index_topk, tokens);
  attention_rows(bench, name + " window", c, 0, tokens);
  index_score_rows(bench, name, c, kEntries, scored);
  top_k_rows(bench, name, c, kEntries, scored);
  compressor(bench, name + " csa", 4, c.head_dim);
  compressor(bench, name + " hca", 128, c.head_dim);
  compressor(bench, name + " index", 4, c.index_head_dim);
  hadamard(bench, name + " index key", 1, c.index_head_dim, false);
  hadamard(bench, name + " index queries", c.index_num_heads, c.index_head_dim, true);
  cache_write(bench, name + " window", ops::kv_entry_layout({}, c.head_dim, c.rope_dim));
  cache_write(bench, name + " index key", ops::index_entry_layout({}, c.index_head_dim));
}

}  // namespace tessera::bench
