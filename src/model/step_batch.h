// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a step is about, row by row: everything that the ops of all layers read besides activations, weights and caches.
// It is worked out on the host from ids and positions alone, and copied in one piece to where the ops compute. Where
// each array lies depends on the numbers of rows and slices only, so a recorded graph finds the next step's there too.
#include <cstdint>
#include <span>
#include <vector>

#include "device/buffer.h"
#include "ops/compressor/compressor.h"
#include "ops/sample/sample.h"

namespace tessera::model {

// Rows [first_row, first_row + num_rows) of the batch are consecutive tokens of one sequence.
struct SliceRows {
  int32_t place = 0;  // of the sequence, in the cache pool
  int64_t first_row = 0, num_rows = 0;
  int64_t first_position = 0;
};

// What layers of one compression ratio read. Addresses are of the ops' memory.
struct RatioRows {
  int64_t ratio = 0;
  const int32_t* visible = nullptr;   // [rows] complete entries at the row's position
  const int32_t* attended = nullptr;  // [rows] of them, at most the indexer's choice
  const ops::CompressorSlice* slices = nullptr;
  int64_t num_entries = 0;                   // rows for entries that may be completed
  int64_t num_completed = 0;                 // entries that are
  const int64_t* entry_positions = nullptr;  // [num_entries] of the window's first token; 0 where none is completed
  const int64_t* entry_slots = nullptr;      // [num_entries] index in the cache; -1 where none is completed
  const int32_t* entry_places = nullptr;     // [num_entries] place of the sequence
};

class StepBatch {
 public:
  struct Limits {
    int64_t max_tokens = 0;
    int64_t window_slots = 0;
    int64_t index_top_k = 0;
    int64_t mask_words = 0;  // of one
  };
  // `ratios`: those above 0 that layers have, distinct. Host memory comes from `staging`.
  StepBatch(std::vector<int64_t> ratios, const Limits& limits, device::MemorySpace& staging,
            device::MemorySpace& memory);

  // The slices, whose tokens are `ids` one after the other, the rows whose logits are computed, in that order, and the
  // draws from them, whose mask_row counts `masks` in order, at most kMaxMasksPerStep. `padded_rows` at least the
  // number of ids (slices of one row each, whose logits are all computed): the rest are rows of nobody, without effect.
  // Copies; what was filled before the last time is not on its way any more.
  void fill(std::span<const SliceRows> slices, std::span<const int32_t> ids, std::span<const int32_t> logit_rows,
            std::span<const ops::SampleRow> draws, std::span<const std::span<const uint32_t>> masks,
            int64_t padded_rows = 0);

  // The first ids, from where the ops compute: in the order of the queue.
  void take_ids(const int32_t* ids, int64_t count) const;

  int64_t num_rows() const { return num_rows_; }
  int64_t num_slices() const { return num_slices_; }
  std::span<const SliceRows> slices() const { return slices_; }  // without nobody's

  // Addresses of the ops' memory, [num_rows] each.
  const int32_t* token_ids() const { return token_ids_; }
  const int64_t* positions() const { return positions_; }
  const int64_t* window_slots() const { return window_slots_; }  // ring slot of each token; -1: not written
  const int32_t* places() const { return places_; }
  // With padding every row: nobody's last.
  const int32_t* logit_rows() const { return logit_rows_; }
  int64_t num_logit_rows() const { return num_logit_rows_; }
  // Without any none; else with padding as many as rows, the last of them greedy ones of nobody.
  const ops::SampleRow* draws() const { return draws_; }
  int64_t num_draws() const { return num_draws_; }
  const uint32_t* masks() const { return masks_; }
  const RatioRows& of_ratio(int64_t ratio) const;

  // The same on the host.
  int64_t most_visible(int64_t ratio, int64_t first_row, int64_t num_rows) const;

 private:
  template <class T>
  T* take(const T*& placed, int64_t count);
  void fill_ratio(RatioRows& rows);

  std::vector<RatioRows> ratios_;
  Limits limits_;
  device::MemorySpace& memory_;
  device::Buffer host_, placed_;
  device::Buffer next_host_;  // host_ in turn, which may be on its way still, where the ops compute elsewhere
  size_t used_ = 0;
  std::vector<SliceRows> slices_;
  int64_t num_rows_ = 0, num_slices_ = 0, num_logit_rows_ = 0, num_draws_ = 0;
  const int32_t *token_ids_ = nullptr, *places_ = nullptr, *logit_rows_ = nullptr;
  const int64_t *positions_ = nullptr, *window_slots_ = nullptr;
  const ops::SampleRow* draws_ = nullptr;
  const uint32_t* masks_ = nullptr;
  const int64_t* host_positions_ = nullptr;
};

}  // namespace tessera::model
