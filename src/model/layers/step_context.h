// SPDX-License-Identifier: Apache-2.0
#pragma once
// What every layer gets in a step: the batch, and where to compute.
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "device/buffer.h"
#include "device/queue.h"
#include "model/config.h"
#include "model/sequence_caches.h"
#include "model/trace.h"

namespace tessera::model {

// Rows [first_row, first_row + num_rows) of the batch are consecutive tokens of one sequence.
struct SliceRows {
  SequenceCaches* state = nullptr;
  int64_t first_row = 0, num_rows = 0;
  int64_t first_position = 0;
};

struct StepContext {
  device::Queue& queue;
  device::Arena& arena;  // activations of this step
  void* workspace;       // scratch of one op call
  Tracer* tracer;        // null: none
  std::span<const SliceRows> slices;
  int64_t num_tokens;           // over all slices
  const int32_t* token_ids;     // [num_tokens]
  const int64_t* positions;     // [num_tokens]
  const int64_t* window_slots;  // [num_tokens]: ring slot of each token
  float* index_scores;          // scratch of the indexer, kScoreRows rows of the longest sequence's entries
  DType activation;

  TensorView take(DType dtype, const Shape& shape) const { return arena.take(dtype, shape); }
  TensorView take_rows(int64_t width) const { return arena.take(activation, {num_tokens, width}); }
  // Names are built only where somebody looks.
  void trace(std::string_view layer, std::string_view name, const TensorView& value) const {
    if (tracer != nullptr) tracer->tensor(std::string(layer) + std::string(name), value);
  }
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

// Rows of one indexer call: bounds its scores to this many times the entries of the longest sequence.
constexpr int64_t kScoreRows = 16;

}  // namespace tessera::model
