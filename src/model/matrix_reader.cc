// SPDX-License-Identifier: Apache-2.0
#include "model/matrix_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ranges>
#include <vector>

#include "base/error.h"
#include "base/integer_math.h"
#include "model/stored_values.h"
#include "numeric/e8m0.h"
#include "numeric/fp8_block.h"
#include "numeric/mxfp4_to_nvfp4.h"

namespace tessera::model {

namespace {

using checkpoint::LocatedTensor;
using ops::WeightFormat;

constexpr int64_t kFp8Block = numeric::kFp8WeightBlock, kNvfp4Group = numeric::kNvfp4Block;
constexpr int64_t kMxfp4Group = numeric::kMxfp4Block;
constexpr uint64_t kReadBytes = 64 << 20;  // between two updates of the progress
constexpr int64_t kPageBytes = 4096;

int64_t num_rows(const WeightSlice& slice) {
  return slice.row_end - slice.row_begin;
}

int64_t num_cols(const WeightSlice& slice) {
  return slice.col_end - slice.col_begin;
}

// Half-open range of FP8 blocks that a range of rows or columns touches.
struct BlockRange {
  BlockRange(int64_t begin, int64_t end)
      : first(begin / kFp8Block), count(end > begin ? ceil_div(end, kFp8Block) - begin / kFp8Block : 0) {}
  int64_t first, count;
};

// Number `i` of FP8 block scales that were read.
float scale_at(const LocatedTensor& tensor, const char* bytes, int64_t i) {
  const DType dtype = *tensor.entry->dtype;
  if (dtype == DType::kF8E8M0) return numeric::e8m0_to_float(static_cast<uint8_t>(bytes[i]));
  float scale = 0;
  widen(dtype, bytes + i * (dtype_bits(dtype) / 8), 1, &scale);
  return scale;
}

// FP8 block scales of a slice as FP32, row by row of blocks.
void read_fp8_scales(const LocatedTensor& tensor, const WeightSlice& slice, float* out) {
  const BlockRange rows(slice.row_begin, slice.row_end), cols(slice.col_begin, slice.col_end);
  const int64_t all_cols = tensor.entry->shape[1], width = dtype_bits(*tensor.entry->dtype) / 8;
  std::vector<char> bytes(static_cast<size_t>(cols.count * width));
  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t first = (rows.first + r) * all_cols + cols.first;
    tensor.read_part(static_cast<uint64_t>(first * width), bytes.size(), bytes.data());
    for (int64_t c = 0; c < cols.count; ++c) {
      const float scale = scale_at(tensor, bytes.data(), c);
      if (!std::isfinite(scale) || scale < 0) {
        fail_value(tensor, first + c, "a finite scale >= 0", fmt::format("{}", scale));
      }
      out[r * cols.count + c] = scale;
    }
  }
}

// Of the whole matrix, so that sums of a slice are those of all of it whatever the slice. (Codes of NaN are refused.)
bool all_scales_fold(const LocatedTensor& tensor) {
  const int64_t rows = tensor.entry->shape[0], cols = tensor.entry->shape[1];
  std::vector<char> bytes(static_cast<size_t>(rows * cols * dtype_bits(*tensor.entry->dtype) / 8));
  tensor.read_part(0, bytes.size(), bytes.data());
  return std::ranges::all_of(std::views::iota(int64_t{0}, rows * cols),
                             [&](int64_t i) { return numeric::fp8_scale_folds(scale_at(tensor, bytes.data(), i)); });
}

float read_tensor_scale(const StoredTensor& stored) {
  float scale = 0;
  stored.tensor_scale.read(&scale);
  const float found = scale;
  if (stored.format == StoredFormat::kNvfp4Reciprocal) scale = 1 / scale;
  // The reciprocal of an infinity would be 0, that of a subnormal number an infinity.
  if (!std::isfinite(found) || !std::isfinite(scale) || scale <= 0) {
    fail_value(stored.tensor_scale, 0, "a finite scale > 0", fmt::format("{}", found));
  }
  return scale;
}

// Values [begin, end) of those that a matrix is made of and that can be wrong.
void check_range(const StoredTensor& stored, const Matrix& matrix, int64_t begin, int64_t end) {
  switch (matrix.view.format) {
    case WeightFormat::kF32:
      return check_finite(stored.codes, matrix.data.as<float>() + begin, end - begin);
    case WeightFormat::kBf16:
      return check_finite_bf16(stored.codes, matrix.data.as<uint16_t>() + begin, end - begin);
    case WeightFormat::kFp8Block:
      return check_e4m3(stored.codes, matrix.data.as<uint8_t>() + begin, end - begin, SignBit::kFree,
                        "an E4M3 value that is not NaN");
    case WeightFormat::kNvfp4:
      return check_e4m3(stored.block_scales, matrix.scales.as<uint8_t>() + begin, end - begin, SignBit::kClear,
                        "a positive E4M3 scale (0x00 to 0x7e)");
  }
}

}  // namespace

ops::WeightFormat format_in_memory(const StoredTensor& stored, const Shape& shape, const WeightSlice& slice) {
  switch (stored.format) {
    case StoredFormat::kF32:
      return WeightFormat::kF32;
    case StoredFormat::kBf16:
      return WeightFormat::kBf16;
    case StoredFormat::kFp8Block: {
      const auto cuts_block = [](int64_t begin, int64_t end, int64_t all) {
        return begin % kFp8Block != 0 || (end - begin != all && (end - begin) % kFp8Block != 0);
      };
      return cuts_block(slice.row_begin, slice.row_end, shape[0]) ||
                     cuts_block(slice.col_begin, slice.col_end, shape[1])
                 ? WeightFormat::kF32
                 : WeightFormat::kFp8Block;
    }
    case StoredFormat::kNvfp4:
    case StoredFormat::kNvfp4Reciprocal:
    case StoredFormat::kMxfp4:
      return WeightFormat::kNvfp4;
  }
  return WeightFormat::kF32;
}

// Part of each of some consecutive rows of a row-major tensor, in bytes.
struct MatrixReader::Rows {
  const LocatedTensor& tensor;
  int64_t first, count;                       // rows
  int64_t row_bytes, part_begin, part_bytes;  // of a row
};

void MatrixReader::check_values(const StoredTensor& stored, const Matrix& matrix) {
  const ops::WeightView& view = matrix.view;
  const int64_t count = view.format == WeightFormat::kNvfp4 ? view.scale_bytes() : view.rows * view.cols;
  const int64_t width = view.format == WeightFormat::kF32 ? 4 : view.format == WeightFormat::kBf16 ? 2 : 1;
  try {
    for_pieces(static_cast<uint64_t>(count * width), [&](uint64_t begin, uint64_t end) {
      check_range(stored, matrix, static_cast<int64_t>(begin) / width, static_cast<int64_t>(end) / width);
    });
  } catch (const Error&) {
    check_range(stored, matrix, 0, count);  // once more in order: names the first
    throw;
  }
}

void MatrixReader::advance(uint64_t bytes) {
  if (progress_ != nullptr) progress_->advance(bytes);
}

void MatrixReader::read_bytes(const LocatedTensor& tensor, uint64_t begin, uint64_t num_bytes, void* out) {
  for (uint64_t done = 0; done < num_bytes;) {
    const uint64_t part = std::min(kReadBytes, num_bytes - done);
    for_pieces(part, [&](uint64_t from, uint64_t to) {
      tensor.read_part(begin + done + from, to - from, static_cast<char*>(out) + done + from);
    });
    done += part;
    advance(part);
  }
}

void MatrixReader::read_rows(const Rows& rows, void* out) {
  if (rows.part_bytes == rows.row_bytes) {
    read_bytes(rows.tensor, static_cast<uint64_t>(rows.first * rows.row_bytes),
               static_cast<uint64_t>(rows.count * rows.row_bytes), out);
    return;
  }
  const auto place = [&](int64_t r) {
    return static_cast<uint64_t>((rows.first + r) * rows.row_bytes + rows.part_begin);
  };
  const auto read_piece = [&](int64_t begin, int64_t end) {
    char* to = static_cast<char*>(out) + begin * rows.part_bytes;
    const auto part_bytes = static_cast<size_t>(rows.part_bytes);
    if (rows.row_bytes - rows.part_bytes >= kPageBytes) {
      for (int64_t r = begin; r < end; ++r, to += part_bytes) rows.tensor.read_part(place(r), part_bytes, to);
      return;
    }
    // What lies between the parts comes from the disk with them; a call for each would take longer than copying.
    std::vector<char> all(static_cast<size_t>((end - begin - 1) * rows.row_bytes) + part_bytes);
    rows.tensor.read_part(place(begin), all.size(), all.data());
    for (const char* from = all.data(); begin < end; ++begin, from += rows.row_bytes, to += part_bytes) {
      std::copy_n(from, part_bytes, to);
    }
  };
  const int64_t rows_each = std::max<int64_t>(1, static_cast<int64_t>(kPieceBytes) / rows.row_bytes);
  for_each_piece(ceil_div(rows.count, rows_each), [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) read_piece(begin * rows_each, std::min(rows.count, (begin + 1) * rows_each));
  });
  advance(static_cast<uint64_t>(rows.count * rows.part_bytes));
}

// Codes, or values, and NVFP4's block scales: bytes as they are.
void MatrixReader::read_plain(const StoredTensor& stored, const Shape& shape, const WeightSlice& slice,
                              const Matrix& matrix) {
  const auto data_bytes = [&](int64_t cols) { return ops::WeightView{matrix.view.format, 1, cols}.data_bytes(); };
  const int64_t first = slice.row_begin + stored.row_offset, rows = matrix.view.rows;
  read_rows(
      {stored.codes, first, rows, data_bytes(shape[1]), data_bytes(slice.col_begin), data_bytes(matrix.view.cols)},
      matrix.data.data());
  if (matrix.view.format != WeightFormat::kNvfp4) return;
  read_rows({stored.block_scales, first, rows, shape[1] / kNvfp4Group, slice.col_begin / kNvfp4Group,
             matrix.view.cols / kNvfp4Group},
            matrix.scales.data());
}

void MatrixReader::read_mxfp4(const StoredTensor& stored, const Shape& shape, const WeightSlice& slice,
                              int global_exponent, const Matrix& matrix) {
  const int64_t rows = matrix.view.rows, blocks = shape[1] / kMxfp4Group, row_bytes = shape[1] / 2;
  const auto convert = [&](uint8_t* codes, const uint8_t* scales, int64_t count, uint8_t* out_scales) {
    num_rounded_blocks_ += numeric::mxfp4_to_nvfp4(codes, scales, count, global_exponent, codes, out_scales);
  };
  if (matrix.view.cols == shape[1]) {
    std::vector<uint8_t> scales(static_cast<size_t>(rows * blocks));
    read_rows({stored.codes, slice.row_begin, rows, row_bytes, 0, row_bytes}, matrix.data.data());
    read_rows({stored.block_scales, slice.row_begin, rows, blocks, 0, blocks}, scales.data());
    convert(matrix.data.as<uint8_t>(), scales.data(), rows * blocks, matrix.scales.as<uint8_t>());
    advance(scales.size());  // the other half of what NVFP4's scales take in memory
    return;
  }
  // A cut may go through a block of 32: whole rows are converted, then cut.
  std::vector<uint8_t> codes(static_cast<size_t>(row_bytes)), scales(static_cast<size_t>(blocks)),
      converted(static_cast<size_t>(2 * blocks));
  const int64_t part_bytes = matrix.view.cols / 2, part_groups = matrix.view.cols / kNvfp4Group;
  for (int64_t r = 0; r < rows; ++r) {
    const uint64_t row = static_cast<uint64_t>(slice.row_begin + r);
    stored.codes.read_part(row * codes.size(), codes.size(), codes.data());
    stored.block_scales.read_part(row * scales.size(), scales.size(), scales.data());
    convert(codes.data(), scales.data(), blocks, converted.data());
    std::copy_n(codes.data() + slice.col_begin / 2, part_bytes, matrix.data.as<uint8_t>() + r * part_bytes);
    std::copy_n(converted.data() + slice.col_begin / kNvfp4Group, part_groups,
                matrix.scales.as<uint8_t>() + r * part_groups);
    advance(static_cast<uint64_t>(part_bytes + part_groups));
  }
}

void MatrixReader::read_fp8_as_float(const StoredTensor& stored, const Shape& shape, const WeightSlice& slice,
                                     const Matrix& matrix) {
  const BlockRange rows(slice.row_begin, slice.row_end), cols(slice.col_begin, slice.col_end);
  std::vector<float> scales(static_cast<size_t>(rows.count * cols.count));
  read_fp8_scales(stored.block_scales, slice, scales.data());
  std::vector<uint8_t> codes(static_cast<size_t>(matrix.view.cols));
  for (int64_t r = 0; r < matrix.view.rows; ++r) {
    const int64_t row = slice.row_begin + r;
    stored.codes.read_part(static_cast<uint64_t>(row * shape[1] + slice.col_begin), codes.size(), codes.data());
    check_e4m3(stored.codes, codes.data(), matrix.view.cols, SignBit::kFree, "an E4M3 value that is not NaN");
    const float* row_scales = scales.data() + (row / kFp8Block - rows.first) * cols.count;
    float* out = matrix.data.as<float>() + r * matrix.view.cols;
    for (int64_t c = 0; c < matrix.view.cols; ++c) {
      out[c] = numeric::kE4m3Values[codes[static_cast<size_t>(c)]] *
               row_scales[(slice.col_begin + c) / kFp8Block - cols.first];
    }
    advance(codes.size() * sizeof(float));
  }
}

Matrix MatrixReader::read(const StoredTensor& stored, const Shape& shape, const WeightSlice& slice,
                          int global_exponent) {
  Matrix matrix;
  ops::WeightView& view = matrix.view;
  view.format = format_in_memory(stored, shape, slice);
  view.rows = num_rows(slice);
  view.cols = num_cols(slice);
  if (view.format == WeightFormat::kNvfp4 && (slice.col_begin % kNvfp4Group != 0 || view.cols % kNvfp4Group != 0)) {
    fail(ErrorCode::kUnsupported,
         fmt::format("tensor {}: a rank's columns must be whole groups of {}", stored.codes.entry->name, kNvfp4Group));
  }
  matrix.data = device::Buffer(static_cast<size_t>(view.data_bytes()), *memory_);
  matrix.scales = device::Buffer(static_cast<size_t>(view.scale_bytes()), *memory_);
  view.data = matrix.data.data();
  view.block_scales = matrix.scales.data();
  if (stored.format == StoredFormat::kMxfp4) {
    read_mxfp4(stored, shape, slice, global_exponent, matrix);
    view.tensor_scale = numeric::mxfp4_global_scale(global_exponent);
  } else if (stored.format == StoredFormat::kFp8Block && view.format == WeightFormat::kF32) {
    read_fp8_as_float(stored, shape, slice, matrix);
  } else {
    read_plain(stored, shape, slice, matrix);
    if (view.format == WeightFormat::kFp8Block) read_fp8_scales(stored.block_scales, slice, matrix.scales.as<float>());
    if (view.format == WeightFormat::kNvfp4) view.tensor_scale = read_tensor_scale(stored);
  }
  check_values(stored, matrix);
  if (view.format == WeightFormat::kFp8Block) view.scales_fold = all_scales_fold(stored.block_scales);
  return matrix;
}

}  // namespace tessera::model
