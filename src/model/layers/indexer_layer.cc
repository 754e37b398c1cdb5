// SPDX-License-Identifier: Apache-2.0
#include "model/layers/indexer_layer.h"

#include <algorithm>

namespace tessera::model {

IndexerLayer::IndexerLayer(LayerBuilder& builder, const std::string& prefix, int64_t ratio) : prefix_(prefix) {
  const Config& c = builder.config;
  const DType activation = builder.activation();
  wq_b_ = LinearLayer(builder, prefix + "wq_b", InputRole::kQuantised, activation);
  weights_proj_ = LinearLayer(builder, prefix + "weights_proj", InputRole::kPlain, activation);
  compressor_ = CompressorLayer(builder, prefix + "compressor.", ratio, CompressorLayer::Kind::kIndex);
  steps_.rope = builder.bind<ops::Rope>(
      prefix + "rope",
      {.vectors = c.index_num_heads, .width = c.index_head_dim, .rope_dim = c.rope_dim, .activation = activation});
  if (builder.precision.cache == ops::CacheMode::kFp8) {
    steps_.hadamard = builder.bind<ops::Hadamard>(
        prefix + "hadamard", {.width = c.index_head_dim, .is_fp4 = true, .activation = activation});
  }
  steps_.rotated = prefix + "queries_rotated", steps_.transformed = prefix + "queries";
  scores_ = builder.bind<ops::IndexScores>(prefix + "scores",
                                           {.heads = c.index_num_heads,
                                            .width = c.index_head_dim,
                                            .keys = ops::index_entry_layout(builder.precision, c.index_head_dim),
                                            .activation = activation});
  top_k_ = builder.bind<ops::TopK>(prefix + "top_k", {.k = c.index_topk});
}

const int32_t* IndexerLayer::select(const StepContext& context, size_t layer, const TensorView& queries,
                                    const TensorView& weights) const {
  const int64_t n = context.num_tokens(), k = top_k_.desc.k;
  const int64_t ratio = compressor_.pool_desc().ratio;
  const int64_t most = context.is_recorded ? context.score_stride : context.batch.most_visible(ratio, 0, n);
  // Whoever sees no more entries than are chosen has all of them, which is less work than to gather.
  const bool are_own = queries.shape[0] != n, is_cut = are_own || (context.run.is_cut() && most > k);
  const int64_t begin = is_cut ? context.run.first : 0, end = is_cut ? begin + context.run.count : n;
  const TensorView selected = context.take(DType::kI32, {is_cut ? context.run.rows : n, k});
  const int32_t* counts = context.batch.of_ratio(ratio).visible;
  const int64_t most_rows = context.num_scores / std::max<int64_t>(most, 1);
  for (int64_t row = begin; row < end; row += most_rows) {
    const int64_t rows = std::min(most_rows, end - row);
    const int64_t stride = context.is_recorded ? context.score_stride : context.batch.most_visible(ratio, row, rows);
    scores_.run({.queries = rows_of(queries, are_own ? row - begin : row, rows),
                 .weights = rows_of(weights, are_own ? row - begin : row, rows),
                 .keys = context.caches.entries(EntriesId::kIndexKeys, layer, context.batch.places() + row),
                 .counts = counts + row,
                 .stride = stride,
                 .scores = context.index_scores,
                 .num_tokens = rows,
                 .num_slices = context.batch.num_slices()},
                context.queue);
    for (int64_t t = 0; t < rows && context.tracer != nullptr; ++t) {
      const int64_t count = context.batch.most_visible(ratio, row + t, 1);
      context.trace(prefix_, "scores", {context.index_scores + t * stride, DType::kF32, {count}});
    }
    top_k_.run({.scores = context.index_scores,
                .stride = stride,
                .counts = counts + row,
                .selected = selected.as<int32_t>() + (row - begin) * k,
                .num_tokens = rows,
                .workspace = context.workspace},
               context.queue);
  }
  context.trace(prefix_, "selection", selected);
  return (is_cut && !are_own ? gather_tokens(context, selected) : selected).as<int32_t>();
}

}  // namespace tessera::model
