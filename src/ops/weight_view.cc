// SPDX-License-Identifier: Apache-2.0
#include "ops/weight_view.h"

#include <algorithm>
#include <span>

#include "base/error.h"
#include "base/integer_math.h"
#include "numeric/fp8_block.h"

namespace tessera::ops {

namespace {

constexpr int64_t kFp8Block = numeric::kFp8WeightBlock;

}  // namespace

std::string_view to_string(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32:
      return "f32";
    case WeightFormat::kBf16:
      return "bf16";
    case WeightFormat::kFp8Block:
      return "fp8-block";
    case WeightFormat::kNvfp4:
      return "nvfp4";
  }
  return "?";
}

int64_t WeightView::data_bytes() const {
  switch (format) {
    case WeightFormat::kF32:
      return rows * cols * 4;
    case WeightFormat::kBf16:
      return rows * cols * 2;
    case WeightFormat::kFp8Block:
      return rows * cols;
    case WeightFormat::kNvfp4:
      return rows * cols / 2;
  }
  return 0;
}

int64_t WeightView::scale_bytes() const {
  switch (format) {
    case WeightFormat::kF32:
    case WeightFormat::kBf16:
      return 0;
    case WeightFormat::kFp8Block:
      return ceil_div(rows, kFp8Block) * ceil_div(cols, kFp8Block) * 4;
    case WeightFormat::kNvfp4:
      return rows * (cols / 16);
  }
  return 0;
}

WeightView WeightView::slice_rows(int64_t row_begin, int64_t row_end) const {
  TESSERA_CHECK(0 <= row_begin && row_begin <= row_end && row_end <= rows, "row slice out of range");
  TESSERA_CHECK(format != WeightFormat::kFp8Block || row_begin % kFp8Block == 0, "FP8 blocks span 128 rows");
  WeightView head = *this;
  head.rows = row_begin;
  WeightView slice = *this;
  slice.rows = row_end - row_begin;
  slice.data = static_cast<const char*>(data) + head.data_bytes();
  if (block_scales != nullptr) slice.block_scales = static_cast<const char*>(block_scales) + head.scale_bytes();
  return slice;
}

bool do_scales_fold(const WeightView& weight) {
  if (weight.format != WeightFormat::kFp8Block) return false;
  const std::span codes(static_cast<const uint8_t*>(weight.data), static_cast<size_t>(weight.data_bytes()));
  const std::span scales(static_cast<const float*>(weight.block_scales),
                         static_cast<size_t>(weight.scale_bytes()) / sizeof(float));
  return std::ranges::all_of(scales, numeric::fp8_scale_folds) &&
         std::ranges::none_of(codes, [](uint8_t code) { return (code & 0x7F) == 0x7F; });
}

}  // namespace tessera::ops
