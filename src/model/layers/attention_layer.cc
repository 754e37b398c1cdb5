// SPDX-License-Identifier: Apache-2.0
#include "model/layers/attention_layer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <span>

#include "comm/rank_columns.h"
#include "comm/rank_sum.h"

namespace tessera::model {

AttentionLayer::AttentionLayer(LayerBuilder& builder, const std::string& prefix, int64_t ratio, bool with_entries)
    : prefix_(prefix), ratio_(ratio), window_slots_(builder.window_slots), with_entries_(with_entries) {
  const Config& c = builder.config;
  const DType activation = builder.activation();
  frequencies_ = builder.place(ratio == 0 ? ops::rope_frequencies(c.rope_dim, c.rope_theta, nullptr)
                                          : ops::rope_frequencies(c.rope_dim, c.compress_rope_theta, &c.yarn));
  wq_a_ = LinearLayer(builder, prefix + "wq_a", InputRole::kQuantised, activation);
  wkv_ = LinearLayer(builder, prefix + "wkv", InputRole::kQuantised, activation);
  const Shard& shard = builder.weights.shard();
  heads_ = AttentionHeads(builder, prefix, prefix, shard);
  head_sum_ = RankSum(builder, shard.attention == AttentionSplit::kByGroup);
  // What ranks add is rounded once, behind the sum.
  const DType output = head_sum_.is_needed() ? DType::kF32 : activation;
  wo_b_ = LinearLayer(builder, prefix + "wo_b", InputRole::kQuantised, output);
  q_norm_ = NormLayer(builder, prefix + "q_norm", prefix + "q_norm.weight", c.q_lora_rank);
  window_steps_.norm.emplace(builder, prefix + "kv_norm", prefix + "kv_norm.weight", c.head_dim);
  window_steps_.rope = builder.bind<ops::Rope>(
      prefix + "kv_rope", {.vectors = 1, .width = c.head_dim, .rope_dim = c.rope_dim, .activation = activation});
  window_steps_.write = builder.bind<ops::CacheWrite>(
      prefix + "window_write",
      {.layout = ops::kv_entry_layout(builder.precision, c.head_dim, c.rope_dim), .activation = activation});
  window_steps_.rotated = prefix + "kv";
  later_window_ = VectorGroup(builder, prefix + "later_window", {&window_steps_});

  if (ratio != 0) {
    compressor_ = CompressorLayer(builder, prefix + "compressor.", ratio, CompressorLayer::Kind::kMain);
  }
  if (ratio == 4) indexer_ = IndexerLayer(builder, prefix + "indexer.", ratio);
  maps_of_x_ = LinearGroupLayer(builder, prefix + "maps_of_x", maps_of_input());
  maps_of_qr_ = LinearGroupLayer(builder, prefix + "maps_of_qr", maps_of_queries(heads_), &q_norm_);
  vectors_ = bind_vectors(builder, prefix + "vectors", heads_);
  std::vector<const CompressorLayer*> compressors;
  if (ratio != 0) compressors.push_back(&compressor_);
  if (ratio == 4) compressors.push_back(&indexer_.compressor());
  if (ratio != 0) {
    pools_ = PoolGroup(builder, prefix + "pools", compressors, maps_of_qr_.has_norm() ? nullptr : &q_norm_);
  }
}

void AttentionLayer::prepare_own_tokens(LayerBuilder& builder) {
  if (builder.comm == nullptr) return;
  if (head_sum_.is_needed()) {
    all_heads_ = AttentionHeads::all_like(heads_, builder, prefix_);
    if (all_heads_ == nullptr) return;
    const Shard& shard = builder.weights.shard();
    Shard part = shard;
    for (part.rank = 0; part.rank < part.world; ++part.rank) {
      LinearLayer& map = wo_b_of_ranks_.emplace_back();
      if (part.rank == shard.rank) continue;
      map = LinearLayer(builder, prefix_ + "wo_b", part, fmt::format("{}all_heads.wo_b.{}", prefix_, part.rank),
                        InputRole::kQuantised, wo_b_.op().desc.output);
    }
    // Normed by whoever norms this rank's.
    all_maps_of_qr_ = LinearGroupLayer(builder, prefix_ + "all_heads.maps_of_qr", maps_of_queries(*all_heads_),
                                       maps_of_qr_.has_norm() ? &q_norm_ : nullptr);
    all_vectors_ = bind_vectors(builder, prefix_ + "all_heads.vectors", *all_heads_);
  }
  has_all_heads_ = true;
}

std::vector<const LinearLayer*> AttentionLayer::maps_of_input() const {
  std::vector<const LinearLayer*> maps = {&wq_a_, &wkv_};
  const auto add = [&](const CompressorLayer& compressor) {
    maps.insert(maps.end(), {&compressor.wkv(), &compressor.wgate()});
  };
  if (ratio_ != 0) add(compressor_);
  if (ratio_ == 4) {
    add(indexer_.compressor());
    maps.push_back(&indexer_.weights_proj());
  }
  return maps;
}

std::vector<const LinearLayer*> AttentionLayer::maps_of_queries(const AttentionHeads& heads) const {
  if (ratio_ == 4) return {&heads.wq_b(), &indexer_.wq_b()};
  return {&heads.wq_b()};
}

VectorGroup AttentionLayer::bind_vectors(LayerBuilder& builder, const std::string& where,
                                         const AttentionHeads& heads) const {
  std::vector<const VectorSteps*> all = {&heads.steps(), &window_steps_};
  if (ratio_ != 0) all.push_back(&compressor_.steps());
  if (ratio_ == 4) all.insert(all.end(), {&indexer_.compressor().steps(), &indexer_.steps()});
  return VectorGroup(builder, where, all);
}

LayerCacheLayout AttentionLayer::cache_layout() const {
  LayerCacheLayout layout;
  layout.ratio = ratio_;
  layout.window = heads_.desc().window;
  layout.window_slots = window_slots_;
  layout.kv = window_steps_.write->desc.layout;
  if (ratio_ != 0) layout.compressor = compressor_.pool_desc();
  if (ratio_ == 4) {
    layout.has_indexer = true;
    layout.index = indexer_.compressor().entry_layout();
    layout.index_compressor = indexer_.compressor().pool_desc();
  }
  return layout;
}

AttentionLayer::Mapped AttentionLayer::run_maps(const StepContext& context, size_t layer, const TensorView& x,
                                                const Queries& queries) const {
  using Call = LinearGroupLayer::Call;
  const int64_t n = context.num_tokens(), num_queries = queries.rows.num_rows;
  const bool are_own = num_queries != n;
  const LinearLayer& wq_b = queries.heads.wq_b();
  Mapped mapped;
  mapped.qr = wq_a_.take_output(context, num_queries), mapped.q = wq_b.take_output(context, num_queries);
  std::array<Call, 7> of_x{{{&wq_a_, mapped.qr}}};
  std::array<comm::Communicator::Gathered, 5> gathered;
  std::array<Call, 2> of_qr{{{&wq_b, mapped.q}}};
  std::array<PoolGroup::Call, ops::PoolNorm::kMostPools> pools;
  size_t num_of_x = 1, num_gathered = 0, num_of_qr = 1, num_pools = 0;
  // Its output of all tokens, which is gathered where ranks have x of their own.
  const auto add_map = [&](const LinearLayer& map) {
    const TensorView own = map.take_output(context, are_own ? context.run.rows : n);
    of_x[num_of_x++] = {&map, rows_of(own, 0, num_queries)};
    if (!are_own) return own;
    const TensorView all = context.take(own.dtype, {context.run.all_rows(), own.shape[1]});
    gathered[num_gathered++] = {own, all};
    return rows_of(all, 0, n);
  };
  mapped.kv = add_map(wkv_);
  // Where its entries will be.
  const auto add_compressor = [&](const CompressorLayer& compressor) {
    const TensorView values = add_map(compressor.wkv()), gates = add_map(compressor.wgate());
    PoolGroup::Call& pool = pools[num_pools++];
    pool = {&compressor, compressor.take_pool_call(context, layer, values, gates)};
    return pool.args.entries;
  };
  if (ratio_ != 0) mapped.entries = add_compressor(compressor_);
  if (ratio_ == 4) {
    mapped.index_keys = add_compressor(indexer_.compressor());
    mapped.index_weights = indexer_.weights_proj().take_output(context, num_queries);
    mapped.index_queries = indexer_.wq_b().take_output(context, num_queries);
    of_x[num_of_x++] = {&indexer_.weights_proj(), mapped.index_weights};
    of_qr[num_of_qr++] = {&indexer_.wq_b(), mapped.index_queries};
  }
  maps_of_x_.run(context, rows_of(x, 0, num_queries), std::span(of_x).first(num_of_x));
  if (are_own) context.run.comm->all_gather(std::span(gathered).first(num_gathered), context.queue);
  const bool is_normed = pools_.run(context, std::span(pools).first(num_pools), q_norm_, mapped.qr);
  const LinearGroupLayer& maps_of_qr = &queries.heads == &heads_ ? maps_of_qr_ : all_maps_of_qr_;
  maps_of_qr.run(context, mapped.qr, std::span(of_qr).first(num_of_qr), is_normed ? nullptr : &q_norm_);
  return mapped;
}

// A ring holds the windows of so many rows at once, whoever's they are.
AttentionLayer::RowRange AttentionLayer::first_rows(const StepContext& context) const {
  return {0, std::min(context.num_tokens(), window_slots_ - heads_.desc().window + 1)};
}

bool AttentionLayer::needs_window(const StepContext& context, const RowRange& range, const RowRange& queries) const {
  const int64_t range_end = range.begin + range.num_rows, queries_end = queries.begin + queries.num_rows;
  for (const SliceRows& slice : context.batch.slices()) {
    const int64_t slice_end = slice.first_row + slice.num_rows;
    const int64_t begin = std::max(slice.first_row, range.begin), end = std::min(slice_end, range_end);
    if (begin >= end) continue;
    const bool stays = end > slice_end - window_slots_;
    const bool has_queries = queries.begin < slice_end && queries_end > slice.first_row;
    if (stays || (has_queries && begin < queries_end && end > queries.begin - heads_.desc().window + 1)) return true;
  }
  return false;
}

VectorSteps::Rows AttentionLayer::window_rows(const StepContext& context, size_t layer, const TensorView& kv,
                                              const RowRange& range) const {
  return {.x = rows_of(kv, range.begin, range.num_rows),
          .positions = context.batch.positions() + range.begin,
          .num_rows = range.num_rows,
          .slots = context.batch.window_slots() + range.begin,
          .cache = context.caches.states(StateId::kWindow, layer, context.batch.places() + range.begin)};
}

void AttentionLayer::finish_vectors(const StepContext& context, size_t layer, const Mapped& mapped,
                                    const Queries& queries) const {
  const int64_t num_queries = queries.rows.num_rows, *positions = context.batch.positions() + queries.rows.begin;
  const RowRange range = first_rows(context);
  std::array<VectorGroup::Call, ops::NormRope::kMostSets> calls{
      {{&queries.heads.steps(), {.x = mapped.q, .positions = positions, .num_rows = num_queries}},
       {&window_steps_, window_rows(context, layer, mapped.kv, range)}}};
  size_t num_calls = 2;
  VectorSteps::Rows entries, keys;
  if (ratio_ != 0) {
    entries = compressor_.entry_rows(context, layer, mapped.entries);
    calls[num_calls++] = {&compressor_.steps(), entries};
  }
  if (ratio_ == 4) {
    keys = indexer_.compressor().entry_rows(context, layer, mapped.index_keys);
    calls[num_calls++] = {&indexer_.compressor().steps(), keys};
    calls[num_calls++] = {&indexer_.steps(),
                          {.x = mapped.index_queries, .positions = positions, .num_rows = num_queries}};
  }
  queries.vectors.run(context, frequencies_.as<float>(), std::span(calls).first(num_calls));
  trace_window(context, layer, range);
  if (entries.num_rows > 0) compressor_.trace_entries(context, layer, entries.x);
  if (keys.num_rows > 0) indexer_.compressor().trace_entries(context, layer, keys.x);
}

void AttentionLayer::write_window(const StepContext& context, size_t layer, const TensorView& kv,
                                  const RowRange& range) const {
  const VectorGroup::Call call{&window_steps_, window_rows(context, layer, kv, range)};
  later_window_.run(context, frequencies_.as<float>(), std::span(&call, 1));
  trace_window(context, layer, range);
}

void AttentionLayer::trace_window(const StepContext& context, size_t layer, const RowRange& range) const {
  if (context.tracer == nullptr) return;
  const int64_t entry_bytes = window_steps_.write->desc.layout.entry_bytes();
  for (const SliceRows& slice : context.batch.slices()) {
    uint8_t* ring = context.caches.state(StateId::kWindow, layer, slice.place);
    const int64_t end = std::min(slice.first_row + slice.num_rows, range.begin + range.num_rows);
    for (int64_t row = std::max(slice.first_row, range.begin); row < end; ++row) {
      const int64_t slot = (slice.first_position + row - slice.first_row) % window_slots_;
      context.trace(prefix_, "window_entry_bytes", {ring + slot * entry_bytes, DType::kU8, {1, entry_bytes}});
    }
  }
}

ops::PagedEntries<const uint8_t> AttentionLayer::entries_of(const StepContext& context, size_t layer,
                                                            const RowRange& queries) const {
  const int32_t* places = context.batch.places();
  if (context.is_recorded) return context.caches.entries(EntriesId::kEntries, layer, places);
  const int64_t most = ratio_ == 4 ? indexer_.top_k() : std::numeric_limits<int64_t>::max();
  return context.caches.near_entries(layer, context.batch.slices(), queries.begin, queries.begin + queries.num_rows,
                                     most, places, context.queue);
}

void AttentionLayer::attend(const StepContext& context, size_t layer, const Queries& queries, const TensorView& q,
                            const ops::PagedEntries<const uint8_t>& all_entries, const int32_t* selected,
                            const RowRange& range, const TensorView& out) const {
  const RowRange& all = queries.rows;
  const int64_t begin = std::max(range.begin, all.begin);
  const int64_t num_rows = std::min(range.begin + range.num_rows, all.begin + all.num_rows) - begin;
  if (num_rows <= 0) return;
  const int32_t* places = context.batch.places() + begin;
  ops::PagedEntries<const uint8_t> entries = all_entries;
  entries.places = places;
  const int64_t stride = selected == nullptr ? 0 : indexer_.top_k(), first = begin - all.begin;
  queries.heads.attend(context,
                       {.q = rows_of(q, first, num_rows),
                        .positions = context.batch.positions() + begin,
                        .window_cache = context.caches.states(StateId::kWindow, layer, places),
                        .window_slots = window_slots_,
                        .entry_cache = entries,
                        .num_entries = ratio_ == 0 ? nullptr : context.batch.of_ratio(ratio_).attended + begin,
                        .selected = selected == nullptr ? nullptr : selected + first * stride,
                        .selected_stride = stride,
                        .out = rows_of(out, first, num_rows),
                        .num_tokens = num_rows},
                       rotates_in_attention(context, queries) ? frequencies_.as<float>() : nullptr);
}

TensorView AttentionLayer::run_heads(const StepContext& context, size_t layer, const TensorView& x,
                                     const Queries& queries) const {
  const int64_t n = context.num_tokens();
  const Mapped mapped = run_maps(context, layer, x, queries);
  // A token attends itself, and the entry that it completes: caches are written before scores and attention. Windows of
  // many rows take turns in the rings, each as long as a ring has room, with attention after each.
  finish_vectors(context, layer, mapped, queries);
  const int32_t* selected = nullptr;
  if (ratio_ == 4) selected = indexer_.select(context, layer, mapped.index_queries, mapped.index_weights);

  ops::PagedEntries<const uint8_t> entries;
  if (with_entries_) entries = entries_of(context, layer, queries.rows);
  const TensorView out = context.take(context.activation, mapped.q.shape);
  RowRange range = first_rows(context);
  attend(context, layer, queries, mapped.q, entries, selected, range, out);
  while (range.begin + range.num_rows < n) {
    range.begin += range.num_rows;
    range.num_rows = std::min(range.num_rows, n - range.begin);
    if (!needs_window(context, range, queries.rows)) continue;
    write_window(context, layer, mapped.kv, range);  // over entries that nobody needs any more
    attend(context, layer, queries, mapped.q, entries, selected, range, out);
  }
  if (!rotates_in_attention(context, queries)) {
    context.trace(prefix_, "attention", out);
    queries.heads.rotate_back(context, out, context.batch.positions() + queries.rows.begin, frequencies_.as<float>());
  }
  context.trace(prefix_, "attention_unrotated", out);
  return queries.heads.to_groups(context, out);
}

void AttentionLayer::run(const StepContext& context, size_t layer, const TensorView& x, const TensorView& result,
                         bool leaves_sum) const {
  const int64_t n = context.num_tokens();
  const ArenaScope scope(context.arena);
  const TensorView low = run_heads(context, layer, x, {heads_, vectors_, {0, n}});
  if (head_sum_.is_needed() && !leaves_sum) {
    head_sum_.run(context, wo_b_.run(context, low, n), result);
  } else {
    wo_b_.run_into(context, low, result, n);
  }
}

void AttentionLayer::run_own(const StepContext& context, size_t layer, const TensorView& x,
                             const TensorView& result) const {
  const ArenaScope scope(context.arena);
  const RowRange own{context.run.first, context.run.count};
  if (all_heads_ == nullptr) {
    return wo_b_.run_into(context, run_heads(context, layer, x, {heads_, vectors_, own}), result, own.num_rows);
  }
  // As ranks do it: each part of the columns is a product of its own, and they are added up in the order of ranks.
  const TensorView low = run_heads(context, layer, x, {*all_heads_, all_vectors_, own});
  const auto world = static_cast<int64_t>(wo_b_of_ranks_.size()), width = low.shape[1] / world;
  const TensorView parts = context.take(low.dtype, {world, own.num_rows, width});
  comm::split_columns(low, parts, context.queue);
  const TensorView summands = context.take(DType::kF32, {world, own.num_rows, result.shape[1]});
  const auto of_rank = [](const TensorView& all, int64_t rank) {
    return reshape(rows_of(all, rank, 1), {all.shape[1], all.shape[2]});
  };
  for (int64_t rank = 0; rank < world; ++rank) {
    const bool is_own = rank == context.run.comm->rank();
    const LinearLayer& wo_b = is_own ? wo_b_ : wo_b_of_ranks_[static_cast<size_t>(rank)];
    wo_b.run_into(context, of_rank(parts, rank), of_rank(summands, rank), own.num_rows);
  }
  comm::sum_ranks(summands.data, DType::kF32, static_cast<int>(world), own.num_rows * result.shape[1], result.data,
                  result.dtype, own.num_rows * result.shape[1], context.queue);
}

}  // namespace tessera::model
