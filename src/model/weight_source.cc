// SPDX-License-Identifier: Apache-2.0
#include "model/weight_source.h"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "base/error.h"
#include "numeric/bf16.h"
#include "numeric/e8m0.h"

namespace tessera::model {

namespace {

using checkpoint::LocatedTensor;
using ops::WeightFormat;

constexpr int64_t kFp8Block = 128, kNvfp4Group = 16;
constexpr uint64_t kReadBytes = 8 << 20;  // between two updates of the progress

[[noreturn]] void fail_value(const LocatedTensor& tensor, int64_t index, const std::string& expected,
                             const std::string& found) {
  fail_data(tensor.file->path(), fmt::format("tensor {} at element {}", tensor.entry->name, index), expected, found);
}

// Widens `count` stored F32 or BF16 values in place or from their bytes.
void widen(DType stored, const void* bytes, int64_t count, float* out) {
  if (stored == DType::kF32) {
    std::memcpy(out, bytes, static_cast<size_t>(count) * 4);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, static_cast<const char*>(bytes) + 2 * i, 2);
    out[i] = numeric::bf16_to_float(bits);
  }
}

void check_finite(const LocatedTensor& tensor, const float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(values[i])) fail_value(tensor, i, "a finite value", fmt::format("{}", values[i]));
  }
}

// Exponent field all ones: infinity or NaN.
void check_finite_bf16(const LocatedTensor& tensor, const uint16_t* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if ((values[i] & 0x7F80) == 0x7F80) fail_value(tensor, i, "a finite value", "a NaN or an infinity");
  }
}

// E4M3 bytes: never NaN (0x7F, 0xFF); with kClear the sign must not be set either (hardware ignores a scale's sign).
enum class SignBit { kFree, kClear };

void check_e4m3(const LocatedTensor& tensor, const uint8_t* codes, int64_t count, SignBit sign, const char* expected) {
  const uint8_t mask = sign == SignBit::kFree ? 0x7F : 0xFF;
  for (int64_t i = 0; i < count; ++i) {
    if ((codes[i] & mask) > 0x7E) fail_value(tensor, i, expected, fmt::format("byte 0x{:02x}", codes[i]));
  }
}

}  // namespace

WeightSource::WeightSource(const checkpoint::Checkpoint& checkpoint, const Config& config, int64_t num_draft_layers,
                           Shard shard, ProgressSink* progress)
    : config_(config), shard_(shard), progress_(progress) {
  std::set<std::string> used;
  for (WeightRow& weight : make_weight_spec(config, num_draft_layers)) {
    const StoredTensor stored = resolve_weight(checkpoint, config, weight, used);
    const WeightSlice slice = slice_of(weight, config, shard);
    const int64_t rows = slice.row_end - slice.row_begin, cols = slice.col_end - slice.col_begin;
    if (weight.kind == WeightKind::kLinear || weight.kind == WeightKind::kPlain) {
      const ops::WeightView view{stored.format, rows, cols};
      total_bytes_ += static_cast<uint64_t>(view.data_bytes() + view.scale_bytes());
    } else {
      total_bytes_ += static_cast<uint64_t>(weight.shape.num_elements()) * 4;
    }
    stored_.emplace(weight.name, stored);
    rows_.emplace(weight.name, std::move(weight));
  }
  for (const LocatedTensor& tensor : checkpoint.tensors()) {
    if (!used.contains(tensor.entry->name)) unused_.push_back(tensor.entry->name);
  }
}

const WeightRow& WeightSource::row(const std::string& name) const {
  const auto at = rows_.find(name);
  TESSERA_CHECK(at != rows_.end(), name);
  return at->second;
}

const StoredTensor& WeightSource::resolved(const std::string& name) const {
  const auto at = stored_.find(name);
  TESSERA_CHECK(at != stored_.end(), name);
  return at->second;
}

Shape WeightSource::local_shape(const std::string& name) const {
  const WeightSlice slice = slice_of(row(name), config_, shard_);
  return {slice.row_end - slice.row_begin, slice.col_end - slice.col_begin};
}

void WeightSource::read_bytes(const LocatedTensor& tensor, uint64_t begin, uint64_t num_bytes, void* out) {
  for (uint64_t done = 0; done < num_bytes;) {
    const uint64_t part = std::min(kReadBytes, num_bytes - done);
    tensor.read_part(begin + done, part, static_cast<char*>(out) + done);
    done += part;
    if (progress_ != nullptr) progress_->advance(part);
  }
}

void WeightSource::add_fingerprint(const std::string& name, const void* data, size_t bytes) {
  fingerprint_ = XXH3_64bits_withSeed(name.data(), name.size(), fingerprint_);
  fingerprint_ = XXH3_64bits_withSeed(data, bytes, fingerprint_);
}

// Copies the slice's bytes of codes and scales; each row of the slice is one run of the row-major tensor.
void WeightSource::read_rows(const StoredTensor& stored, const WeightSlice& slice, const Matrix& matrix) {
  const ops::WeightView& view = matrix.view;
  const ops::WeightView one_row{view.format, 1, view.cols};
  const int64_t full_cols = view.format == WeightFormat::kNvfp4
                                ? stored.codes.entry->shape[1] * 2
                                : stored.codes.entry->shape[stored.codes.entry->shape.rank() - 1];
  const bool is_whole_width = view.cols == full_cols;
  const auto copy = [&](const LocatedTensor& tensor, int64_t full_row_bytes, int64_t row_bytes, int64_t skip,
                        void* out) {
    const int64_t first = slice.row_begin + stored.row_offset;
    if (is_whole_width) {
      read_bytes(tensor, static_cast<uint64_t>(first * full_row_bytes), static_cast<uint64_t>(view.rows * row_bytes),
                 out);
      return;
    }
    for (int64_t r = 0; r < view.rows; ++r) {
      read_bytes(tensor, static_cast<uint64_t>((first + r) * full_row_bytes + skip), static_cast<uint64_t>(row_bytes),
                 static_cast<char*>(out) + r * row_bytes);
    }
  };
  const int64_t data_row = one_row.data_bytes();
  copy(stored.codes, data_row * full_cols / view.cols, data_row, data_row * slice.col_begin / view.cols,
       matrix.data.data());
  if (view.format == WeightFormat::kNvfp4) {
    const int64_t groups = view.cols / kNvfp4Group;
    copy(stored.block_scales, full_cols / kNvfp4Group, groups, slice.col_begin / kNvfp4Group, matrix.scales.data());
  }
}

namespace {

// The slice's FP8 block scales as FP32. Slices must begin at a block.
void load_fp8_scales(const LocatedTensor& tensor, const WeightSlice& slice, const Matrix& matrix) {
  if (slice.row_begin % kFp8Block != 0 || slice.col_begin % kFp8Block != 0) {
    fail(ErrorCode::kUnsupported,
         fmt::format("tensor {}: a rank's slice must begin at a block of {}", tensor.entry->name, kFp8Block));
  }
  const int64_t all_cols = tensor.entry->shape[1];
  std::vector<char> bytes(tensor.entry->num_bytes);
  tensor.read(bytes.data());
  const int64_t rows = (matrix.view.rows + kFp8Block - 1) / kFp8Block,
                cols = (matrix.view.cols + kFp8Block - 1) / kFp8Block;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const int64_t index = (slice.row_begin / kFp8Block + r) * all_cols + slice.col_begin / kFp8Block + c;
      float scale = 0;
      if (tensor.entry->dtype == DType::kF8E8M0) {
        scale = numeric::e8m0_to_float(static_cast<uint8_t>(bytes[static_cast<size_t>(index)]));
      } else {
        const int64_t width = dtype_bits(*tensor.entry->dtype) / 8;
        widen(*tensor.entry->dtype, bytes.data() + index * width, 1, &scale);
      }
      if (!std::isfinite(scale) || scale < 0)
        fail_value(tensor, index, "a finite scale >= 0", fmt::format("{}", scale));
      matrix.scales.as<float>()[r * cols + c] = scale;
    }
  }
}

void check_values(const StoredTensor& stored, const Matrix& matrix) {
  const ops::WeightView& view = matrix.view;
  const int64_t count = view.rows * view.cols;
  switch (view.format) {
    case WeightFormat::kF32:
      check_finite(stored.codes, matrix.data.as<float>(), count);
      return;
    case WeightFormat::kBf16:
      check_finite_bf16(stored.codes, matrix.data.as<uint16_t>(), count);
      return;
    case WeightFormat::kFp8Block:
      check_e4m3(stored.codes, matrix.data.as<uint8_t>(), count, SignBit::kFree, "an E4M3 value that is not NaN");
      return;
    case WeightFormat::kNvfp4:
      check_e4m3(stored.block_scales, matrix.scales.as<uint8_t>(), view.scale_bytes(), SignBit::kClear,
                 "a positive E4M3 scale (0x00 to 0x7e)");
      return;
  }
}

Matrix pack(Matrix matrix, const ops::PackedLayout& layout) {
  Matrix packed;
  packed.view = matrix.view;
  packed.data = device::Buffer(static_cast<size_t>(layout.data_bytes(matrix.view)));
  packed.scales = device::Buffer(static_cast<size_t>(layout.scale_bytes(matrix.view)));
  packed.view.data = packed.data.data();
  packed.view.block_scales = packed.scales.data();
  layout.pack(matrix.view, packed.view);
  return packed;
}

}  // namespace

Matrix WeightSource::load_matrix(const std::string& name, const ops::PackedLayout* layout) {
  const StoredTensor& stored = resolved(name);
  const WeightSlice slice = slice_of(row(name), config_, shard_);
  Matrix matrix;
  matrix.view.format = stored.format;
  matrix.view.rows = slice.row_end - slice.row_begin;
  matrix.view.cols = slice.col_end - slice.col_begin;
  if (stored.format == WeightFormat::kNvfp4 &&
      (slice.col_begin % kNvfp4Group != 0 || matrix.view.cols % kNvfp4Group != 0)) {
    fail(ErrorCode::kUnsupported,
         fmt::format("tensor {}: a rank's columns must be whole groups of {}", name, kNvfp4Group));
  }
  matrix.data = device::Buffer(static_cast<size_t>(matrix.view.data_bytes()));
  matrix.scales = device::Buffer(static_cast<size_t>(matrix.view.scale_bytes()));
  matrix.view.data = matrix.data.data();
  matrix.view.block_scales = matrix.scales.data();
  read_rows(stored, slice, matrix);
  if (stored.format == WeightFormat::kFp8Block) load_fp8_scales(stored.block_scales, slice, matrix);
  if (stored.format == WeightFormat::kNvfp4) {
    stored.tensor_scale.read(&matrix.view.tensor_scale);
    if (!std::isfinite(matrix.view.tensor_scale) || matrix.view.tensor_scale <= 0) {
      fail_value(stored.tensor_scale, 0, "a finite scale > 0", fmt::format("{}", matrix.view.tensor_scale));
    }
    add_fingerprint(name, &matrix.view.tensor_scale, sizeof(float));
  }
  check_values(stored, matrix);
  add_fingerprint(name, matrix.data.data(), matrix.data.size());
  add_fingerprint(name, matrix.scales.data(), matrix.scales.size());
  return layout == nullptr ? std::move(matrix) : pack(std::move(matrix), *layout);
}

device::Tensor WeightSource::load_vector(const std::string& name) {
  const WeightRow& weight = row(name);
  const StoredTensor& stored = resolved(name);
  std::vector<char> bytes(stored.codes.entry->num_bytes);
  read_bytes(stored.codes, 0, bytes.size(), bytes.data());
  std::vector<float> values(static_cast<size_t>(weight.shape.num_elements()));
  widen(*stored.codes.entry->dtype, bytes.data(), weight.shape.num_elements(), values.data());
  check_finite(stored.codes, values.data(), weight.shape.num_elements());
  add_fingerprint(name, bytes.data(), bytes.size());
  const WeightSlice slice = slice_of(weight, config_, shard_);
  const int64_t cols = weight.shape.rank() > 1 ? weight.shape[1] : 1, rows = slice.row_end - slice.row_begin;
  device::Tensor tensor(DType::kF32, weight.shape.rank() > 1 ? Shape{rows, cols} : Shape{rows});
  std::copy_n(values.data() + slice.row_begin * cols, rows * cols, tensor.as<float>());
  return tensor;
}

device::Tensor WeightSource::load_table(const std::string& name) {
  const WeightRow& weight = row(name);
  const StoredTensor& stored = resolved(name);
  const int64_t count = weight.shape.num_elements(), top_k = weight.shape[1];
  std::vector<char> bytes(stored.codes.entry->num_bytes);
  read_bytes(stored.codes, 0, bytes.size(), bytes.data());
  device::Tensor table(DType::kI32, weight.shape);
  int32_t* ids = table.as<int32_t>();
  for (int64_t i = 0; i < count; ++i) {
    int64_t id = 0;
    if (stored.codes.entry->dtype == DType::kI64) {
      std::memcpy(&id, bytes.data() + 8 * i, 8);
    } else {
      int32_t narrow = 0;
      std::memcpy(&narrow, bytes.data() + 4 * i, 4);
      id = narrow;
    }
    if (id < 0 || id >= config_.num_experts) {
      fail_value(stored.codes, i, fmt::format("an expert id below {}", config_.num_experts), fmt::format("{}", id));
    }
    for (int64_t j = i - i % top_k; j < i; ++j) {
      if (ids[j] == id) fail_value(stored.codes, i, "different experts in a row", fmt::format("{} twice", id));
    }
    ids[i] = static_cast<int32_t>(id);
  }
  add_fingerprint(name, bytes.data(), bytes.size());
  return table;
}

}  // namespace tessera::model
