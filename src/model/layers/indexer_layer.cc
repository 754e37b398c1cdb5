// SPDX-License-Identifier: Apache-2.0
#include "model/layers/indexer_layer.h"

#include <algorithm>

namespace tessera::model {

IndexerLayer::IndexerLayer(LayerBuilder& builder, const std::string& prefix, int64_t ratio,
                           const std::vector<float>& frequencies)
    : prefix_(prefix), frequencies_(&frequencies) {
  const Config& c = builder.config;
  const DType activation = builder.activation();
  wq_b_ = LinearLayer(builder, prefix + "wq_b", InputRole::kQuantised, activation);
  weights_proj_ = LinearLayer(builder, prefix + "weights_proj", InputRole::kPlain, activation);
  compressor_ = CompressorLayer(builder, prefix + "compressor.", ratio, CompressorLayer::Kind::kIndex, frequencies);
  rope_ = builder.bind<ops::Rope>(
      prefix + "rope",
      {.vectors = c.index_num_heads, .width = c.index_head_dim, .rope_dim = c.rope_dim, .activation = activation});
  has_hadamard_ = builder.precision.cache == ops::CacheMode::kFp8;
  if (has_hadamard_) {
    hadamard_ = builder.bind<ops::Hadamard>(prefix + "hadamard",
                                            {.width = c.index_head_dim, .is_fp4 = true, .activation = activation});
  }
  scores_ = builder.bind<ops::IndexScores>(prefix + "scores",
                                           {.heads = c.index_num_heads,
                                            .width = c.index_head_dim,
                                            .keys = ops::index_entry_layout(builder.precision, c.index_head_dim),
                                            .activation = activation});
  top_k_ = builder.bind<ops::TopK>(prefix + "top_k", {.k = c.index_topk});
}

const int32_t* IndexerLayer::run(const StepContext& context, size_t layer, const TensorView& x, const TensorView& qr,
                                 int32_t* counts) const {
  const int64_t n = context.num_tokens, k = top_k_.desc.k;
  const TensorView selected = context.take(DType::kI32, {n, k});
  const ArenaScope scope(context.arena);
  compressor_.run(context, layer, x);
  const TensorView queries = wq_b_.run(context, qr, n);
  rope_.run({.x = queries, .positions = context.positions, .frequencies = frequencies_->data(), .num_tokens = n},
            context.queue);
  context.trace(prefix_, "queries_rotated", queries);
  if (has_hadamard_) hadamard_.run({.x = queries, .num_rows = n * scores_.desc.heads}, context.queue);
  context.trace(prefix_, "queries", queries);
  const TensorView weights = weights_proj_.run(context, x, n);

  for (const SliceRows& slice : context.slices) {
    const uint8_t* keys = slice.state->layer(layer).index_keys.as<uint8_t>();
    for (int64_t done = 0; done < slice.num_rows; done += kScoreRows) {
      const int64_t row = slice.first_row + done, rows = std::min(kScoreRows, slice.num_rows - done);
      const int64_t stride = counts[row + rows - 1];  // counts rise with the position
      scores_.run({.queries = rows_of(queries, row, rows),
                   .weights = rows_of(weights, row, rows),
                   .keys = keys,
                   .counts = counts + row,
                   .stride = stride,
                   .scores = context.index_scores,
                   .num_tokens = rows},
                  context.queue);
      for (int64_t t = 0; t < rows; ++t) {
        context.trace(prefix_, "scores", {context.index_scores + t * stride, DType::kF32, {counts[row + t]}});
      }
      top_k_.run({.scores = context.index_scores,
                  .stride = stride,
                  .counts = counts + row,
                  .selected = selected.as<int32_t>() + row * k,
                  .num_tokens = rows,
                  .workspace = context.workspace},
                 context.queue);
    }
  }
  context.trace(prefix_, "selection", selected);
  for (int64_t t = 0; t < n; ++t) counts[t] = static_cast<int32_t>(std::min<int64_t>(counts[t], k));
  return selected.as<int32_t>();
}

}  // namespace tessera::model
