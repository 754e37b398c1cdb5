// SPDX-License-Identifier: Apache-2.0
#include "model/step_batch.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/integer_math.h"
#include "model/runner.h"

namespace tessera::model {

namespace {

constexpr size_t kAlignment = 16;

}  // namespace

StepBatch::StepBatch(std::vector<int64_t> ratios, const Limits& limits, device::MemorySpace& staging,
                     device::MemorySpace& memory)
    : limits_(limits), memory_(memory) {
  for (const int64_t ratio : ratios) ratios_.push_back({.ratio = ratio});
  const size_t rows = static_cast<size_t>(limits.max_tokens);
  const size_t per_ratio = 2 * 4 + sizeof(ops::CompressorSlice) + 8 + 8 + 4;
  const size_t per_row = 3 * 4 + 2 * 8 + sizeof(ops::SampleRow) + per_ratio * ratios_.size();
  const size_t arrays = 7 + 6 * ratios_.size();
  const size_t masks = static_cast<size_t>(std::min(limits.max_tokens, kMaxMasksPerStep) * limits.mask_words) * 4;
  host_ = device::Buffer(rows * per_row + masks + arrays * kAlignment, staging);
  if (!memory.is_host()) {
    placed_ = device::Buffer(host_.size(), memory);
    next_host_ = device::Buffer(host_.size(), staging);
  }
  slices_.reserve(rows);
}

// The next `count` values: where the host writes them; `placed` becomes where ops read them.
template <class T>
T* StepBatch::take(const T*& placed, int64_t count) {
  const size_t begin = used_;
  used_ = round_up(begin + static_cast<size_t>(count) * sizeof(T), kAlignment);
  TESSERA_CHECK(used_ <= host_.size(), "the batch has room for the largest step");
  placed = reinterpret_cast<const T*>((memory_.is_host() ? host_ : placed_).as<char>() + begin);
  return reinterpret_cast<T*>(host_.as<char>() + begin);
}

void StepBatch::fill(std::span<const SliceRows> slices, std::span<const int32_t> ids,
                     std::span<const int32_t> logit_rows, std::span<const ops::SampleRow> draws,
                     std::span<const std::span<const uint32_t>> masks, int64_t padded_rows) {
  const int64_t num_ids = static_cast<int64_t>(ids.size());
  const bool is_padded = padded_rows > 0;
  num_rows_ = is_padded ? padded_rows : num_ids;
  TESSERA_CHECK(num_ids <= num_rows_ && num_rows_ <= limits_.max_tokens, "rows");
  TESSERA_CHECK(!is_padded || (slices.size() == ids.size() && logit_rows.size() == ids.size()),
                "only slices of one row each, with logits, are padded");
  TESSERA_CHECK(static_cast<int64_t>(draws.size()) <= limits_.max_tokens, "draws");
  slices_.assign(slices.begin(), slices.end());
  num_slices_ = is_padded ? padded_rows : static_cast<int64_t>(slices.size());
  num_logit_rows_ = is_padded ? padded_rows : static_cast<int64_t>(logit_rows.size());
  used_ = 0;
  if (!memory_.is_host()) std::swap(host_, next_host_);
  int32_t *host_ids = take(token_ids_, num_rows_), *host_places = take(places_, num_rows_);
  int64_t *positions = take(positions_, num_rows_), *slots = take(window_slots_, num_rows_);
  int32_t* host_logit_rows = take(logit_rows_, num_rows_);
  host_positions_ = positions;
  std::copy(ids.begin(), ids.end(), host_ids);
  for (const SliceRows& slice : slices) {
    for (int64_t i = 0; i < slice.num_rows; ++i) {
      const int64_t row = slice.first_row + i;
      positions[row] = slice.first_position + i;
      slots[row] = positions[row] % limits_.window_slots;
      host_places[row] = slice.place;
    }
  }
  for (int64_t row = num_ids; row < num_rows_; ++row) {
    host_ids[row] = 0, positions[row] = 0, slots[row] = -1, host_places[row] = 0;
  }
  std::copy(logit_rows.begin(), logit_rows.end(), host_logit_rows);
  for (int64_t i = static_cast<int64_t>(logit_rows.size()); i < num_logit_rows_; ++i) {
    host_logit_rows[i] = static_cast<int32_t>(i);
  }
  for (RatioRows& rows : ratios_) fill_ratio(rows);
  num_draws_ = !draws.empty() && is_padded ? padded_rows : static_cast<int64_t>(draws.size());
  ops::SampleRow* host_draws = take(draws_, num_draws_);
  std::fill(std::copy(draws.begin(), draws.end(), host_draws), host_draws + num_draws_, ops::SampleRow{});
  // Last, since their number has no part in where the others lie.
  uint32_t* host_masks = take(masks_, static_cast<int64_t>(masks.size()) * limits_.mask_words);
  for (const std::span<const uint32_t> mask : masks) host_masks = std::copy(mask.begin(), mask.end(), host_masks);
  if (!memory_.is_host()) memory_.upload(placed_.data(), host_.data(), used_);
}

void StepBatch::take_ids(const int32_t* ids, int64_t count) const {
  memory_.copy(const_cast<int32_t*>(token_ids_), ids, static_cast<size_t>(count) * sizeof(int32_t));
}

void StepBatch::fill_ratio(RatioRows& rows) {
  const int64_t ratio = rows.ratio, num_padding = num_slices_ - static_cast<int64_t>(slices_.size());
  int32_t *visible = take(rows.visible, num_rows_), *attended = take(rows.attended, num_rows_);
  for (int64_t row = 0; row < num_rows_; ++row) {
    visible[row] = static_cast<int32_t>((host_positions_[row] + 1) / ratio);
    attended[row] = ratio == 4 ? std::min(visible[row], static_cast<int32_t>(limits_.index_top_k)) : visible[row];
  }
  ops::CompressorSlice* out = take(rows.slices, num_slices_);
  rows.num_entries = num_padding, rows.num_completed = 0;
  for (const SliceRows& slice : slices_) rows.num_entries += ops::most_completed(ratio, slice.num_rows);
  int64_t *positions = take(rows.entry_positions, rows.num_entries), *slots = take(rows.entry_slots, rows.num_entries);
  int32_t* places = take(rows.entry_places, rows.num_entries);
  int64_t entry = 0;
  for (const SliceRows& slice : slices_) {
    *out++ = {.place = slice.place,
              .first_row = static_cast<int32_t>(slice.first_row),
              .num_rows = static_cast<int32_t>(slice.num_rows),
              .first_entry = static_cast<int32_t>(entry),
              .first_position = slice.first_position};
    const int64_t completed = ops::entries_completed(ratio, slice.first_position, slice.num_rows);
    rows.num_completed += completed;
    for (int64_t i = 0; i < ops::most_completed(ratio, slice.num_rows); ++i, ++entry) {
      const int64_t slot = slice.first_position / ratio + i;
      slots[entry] = i < completed ? slot : -1;
      positions[entry] = i < completed ? slot * ratio : 0;
      places[entry] = slice.place;
    }
  }
  for (; entry < rows.num_entries; ++entry) {
    *out++ = {};
    slots[entry] = -1, positions[entry] = 0, places[entry] = 0;
  }
}

const RatioRows& StepBatch::of_ratio(int64_t ratio) const {
  const auto found =
      std::find_if(ratios_.begin(), ratios_.end(), [&](const RatioRows& rows) { return rows.ratio == ratio; });
  TESSERA_CHECK(found != ratios_.end(), "a ratio of the model");
  return *found;
}

int64_t StepBatch::most_visible(int64_t ratio, int64_t first_row, int64_t num_rows) const {
  int64_t most = 0;
  for (int64_t row = first_row; row < first_row + num_rows; ++row) {
    most = std::max(most, (host_positions_[row] + 1) / ratio);
  }
  return most;
}

}  // namespace tessera::model
