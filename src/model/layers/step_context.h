// SPDX-License-Identifier: Apache-2.0
#pragma once
// What every layer gets in a step: the batch, and where to compute.
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "device/buffer.h"
#include "device/queue.h"
#include "model/cache_pool.h"
#include "model/layers/token_run.h"
#include "model/step_batch.h"
#include "model/trace.h"

namespace tessera::model {

struct StepContext {
  device::Queue& queue;
  device::Arena& arena;  // activations of this step
  void* workspace;       // scratch of one op call
  Tracer* tracer;        // null: none
  const StepBatch& batch;
  const CachePool& caches;
  float* index_scores;   // scratch of the indexer, [num_scores]
  int64_t num_scores;    // score_floats() of them
  int64_t score_stride;  // entries of the longest sequence
  bool is_recorded;      // nothing may depend on positions then
  DType activation;
  TokenRun run{};  // where the step's tokens are cut over ranks

  int64_t num_tokens() const { return batch.num_rows(); }
  // Of arrays beside the streams.
  int64_t stream_rows() const { return run.is_cut() ? run.rows : num_tokens(); }
  TensorView take(DType dtype, const Shape& shape) const { return arena.take(dtype, shape); }
  TensorView take_rows(int64_t width) const { return arena.take(activation, {num_tokens(), width}); }
  // Names are built only where somebody looks.
  void trace(std::string_view layer, std::string_view name, const TensorView& value) const {
    if (tracer != nullptr) show(std::string(layer) + std::string(name), value);
  }

 private:
  void show(const std::string& name, const TensorView& value) const;
};

// Gives back, at scope exit, everything taken from the arena since.
class ArenaScope {
 public:
  explicit ArenaScope(device::Arena& arena) : arena_(arena), mark_(arena.mark()) {}
  ~ArenaScope() { arena_.reset_to(mark_); }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  device::Arena& arena_;
  size_t mark_;
};

// Rows [begin, begin + count) of a view whose first dimension is rows.
TensorView rows_of(const TensorView& view, int64_t begin, int64_t count);
// The same memory under another shape of as many elements.
TensorView reshape(const TensorView& view, const Shape& shape);

// The indexer's scores of a call: as many rows as fit into 32 MiB, which stay in a GPU's L2 until the selection has
// read them, and at least kScoreRows; `max_rows` of a step, `stride` entries of the longest sequence.
constexpr int64_t kScoreRows = 16, kScoreFloats = 8 << 20;
inline int64_t score_floats(int64_t max_rows, int64_t stride) {
  return std::min(max_rows * stride, std::max(kScoreRows * stride, kScoreFloats));
}

}  // namespace tessera::model
