// SPDX-License-Identifier: Apache-2.0
#include "doctor/repair.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "base/error.h"
#include "numeric/fp8_block.h"
#include "numeric/nvfp4.h"
#include "ops/reference_rows.h"

namespace tessera::doctor {

namespace {

using model::Matrix;
using ops::WeightFormat;

void swap_nibbles(Matrix& matrix) {
  uint8_t* codes = matrix.data.as<uint8_t>();
  for (int64_t i = 0; i < matrix.view.data_bytes(); ++i) codes[i] = static_cast<uint8_t>(codes[i] << 4 | codes[i] >> 4);
}

// A GGUF block keeps element j of 16 in the low nibble of byte j and element j + 8 in the high one.
void undo_gguf(Matrix& matrix) {
  constexpr int kBytes = numeric::kNvfp4Block / 2;
  uint8_t* codes = matrix.data.as<uint8_t>();
  for (int64_t block = 0; block < matrix.view.data_bytes() / kBytes; ++block, codes += kBytes) {
    uint8_t element[numeric::kNvfp4Block];
    for (int j = 0; j < kBytes; ++j) element[j] = codes[j] & 15, element[j + kBytes] = codes[j] >> 4;
    for (int j = 0; j < kBytes; ++j) codes[j] = static_cast<uint8_t>(element[2 * j] | element[2 * j + 1] << 4);
  }
}

void reorder_scales(Matrix& matrix, ScaleOrder order) {
  const int64_t rows = matrix.view.rows, groups = matrix.view.cols / numeric::kNvfp4Block;
  const device::Buffer stored = matrix.scales.clone();
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t g = 0; g < groups; ++g) {
      matrix.scales.as<uint8_t>()[r * groups + g] = stored.as<uint8_t>()[scale_index(order, r, g, rows, groups)];
    }
  }
}

int64_t num_fp8_scales(const Matrix& matrix) {
  return matrix.view.scale_bytes() / static_cast<int64_t>(sizeof(float));
}

template <class Change>
void change_values(Matrix& matrix, Change change) {
  const int64_t count = matrix.view.rows * matrix.view.cols;
  const TensorView values{matrix.data.data(),
                          matrix.view.format == WeightFormat::kF32 ? DType::kF32 : DType::kBF16,
                          {matrix.view.rows, matrix.view.cols}};
  std::vector<float> row(static_cast<size_t>(count));
  ops::load_floats(values, 0, count, row.data());
  for (float& x : row) x = change(x);
  ops::store_floats(values, 0, count, row.data());
}

void multiply(Matrix& matrix, double factor) {
  if (matrix.view.format == WeightFormat::kF32 || matrix.view.format == WeightFormat::kBf16) {
    return change_values(matrix, [&](float x) { return static_cast<float>(x * factor); });
  }
  matrix.view.tensor_scale = static_cast<float>(matrix.view.tensor_scale * factor);
  if (matrix.view.format != WeightFormat::kFp8Block) return;
  matrix.view.tensor_scale = 1;
  matrix.view.scales_fold = false;  // whatever the factor
  float* scales = matrix.scales.as<float>();
  for (int64_t i = 0; i < num_fp8_scales(matrix); ++i) scales[i] = static_cast<float>(scales[i] * factor);
}

void permute_rows(Matrix& matrix, const std::vector<int64_t>& rows) {
  const auto permute = [&](device::Buffer& buffer, int64_t row_bytes) {
    const device::Buffer stored = buffer.clone();
    for (size_t r = 0; r < rows.size(); ++r) {
      std::memcpy(buffer.as<char>() + static_cast<int64_t>(r) * row_bytes, stored.as<char>() + rows[r] * row_bytes,
                  static_cast<size_t>(row_bytes));
    }
  };
  permute(matrix.data, matrix.view.data_bytes() / matrix.view.rows);
  if (matrix.view.format == WeightFormat::kNvfp4) permute(matrix.scales, matrix.view.scale_bytes() / matrix.view.rows);
}

std::vector<int64_t> rolled(int64_t count, int64_t shift) {
  std::vector<int64_t> rows(static_cast<size_t>(count));
  for (int64_t r = 0; r < count; ++r) rows[static_cast<size_t>(r)] = ((r + shift) % count + count) % count;
  return rows;
}

void shift_fp8_scales(Matrix& matrix, int64_t shift) {
  const device::Buffer stored = matrix.scales.clone();
  const int64_t count = num_fp8_scales(matrix);
  for (int64_t i = 0; i < count; ++i) {
    matrix.scales.as<float>()[i] = stored.as<float>()[((i + shift) % count + count) % count];
  }
}

void apply(const Repair& repair, Matrix& matrix, model::WeightSource& plain) {
  TESSERA_CHECK(can_repair(repair, matrix.view.format), repair.tensor);
  switch (repair.kind) {
    case RepairKind::kSwapNibbles:
      return swap_nibbles(matrix);
    case RepairKind::kGgufOrder:
      return undo_gguf(matrix);
    case RepairKind::kReorderScales:
      return reorder_scales(matrix, repair.order);
    case RepairKind::kMultiply:
      return multiply(matrix, repair.factor);
    case RepairKind::kAdd:
      break;
    case RepairKind::kRollRows:
      return permute_rows(matrix, rolled(matrix.view.rows, repair.shift));
    case RepairKind::kReadFrom: {
      Matrix other = plain.load_matrix(repair.other);
      TESSERA_CHECK(other.view.format == matrix.view.format && other.view.rows == matrix.view.rows &&
                        other.view.cols == matrix.view.cols,
                    repair.other);
      matrix = std::move(other);
      return;
    }
    case RepairKind::kPermuteRows:
      return permute_rows(matrix, repair.rows);
    case RepairKind::kShiftFp8Scales:
      return shift_fp8_scales(matrix, repair.shift);
  }
}

}  // namespace

bool can_repair(const Repair& repair, WeightFormat format) {
  switch (repair.kind) {
    case RepairKind::kSwapNibbles:
    case RepairKind::kGgufOrder:
    case RepairKind::kReorderScales:
      return format == WeightFormat::kNvfp4;
    case RepairKind::kMultiply:
    case RepairKind::kReadFrom:
      return true;
    case RepairKind::kAdd:
      return false;  // vectors alone
    case RepairKind::kRollRows:
    case RepairKind::kPermuteRows:
      return format != WeightFormat::kFp8Block;  // its scales span 128 rows
    case RepairKind::kShiftFp8Scales:
      return format == WeightFormat::kFp8Block;
  }
  return false;
}

void RepairPlan::add(Repair repair) {
  std::vector<Repair>& repairs = by_tensor_[repair.tensor];
  repairs.push_back(std::move(repair));
}

int64_t RepairPlan::first_layer(int64_t num_layers) const {
  constexpr std::string_view kPrefix = "layers.";
  int64_t first = num_layers;
  for (const auto& [tensor, repairs] : by_tensor_) {
    int64_t layer = 0;
    if (tensor == "embed") return 0;
    if (!tensor.starts_with(kPrefix)) continue;
    std::from_chars(tensor.data() + kPrefix.size(), tensor.data() + tensor.size(), layer);
    first = std::min(first, layer);
  }
  return first;
}

void RepairEdit::edit(const std::string& name, Matrix& matrix) const {
  const auto at = plan_.by_tensor().find(name);
  if (at == plan_.by_tensor().end()) return;
  for (const Repair& repair : at->second) apply(repair, matrix, plain_);
  matrix.view.data = matrix.data.data();
  matrix.view.block_scales = matrix.scales.data();
}

void RepairEdit::edit_values(const std::string& name, device::Tensor& values) const {
  const auto at = plan_.by_tensor().find(name);
  if (at == plan_.by_tensor().end()) return;
  const int64_t count = values.view().shape.num_elements(), rows = values.view().shape[0], width = count / rows;
  const bool is_table = values.view().dtype == DType::kI32;
  for (const Repair& repair : at->second) {
    if (repair.kind == RepairKind::kReadFrom) {
      values = is_table ? plain_.load_table(repair.other) : plain_.load_vector(repair.other);
      TESSERA_CHECK(values.view().shape.num_elements() == count, repair.other);
    } else if (repair.kind == RepairKind::kRollRows) {
      uint32_t* bits = static_cast<uint32_t*>(values.view().data);  // F32 or I32
      std::rotate(bits, bits + ((repair.shift % rows + rows) % rows) * width, bits + count);
    } else {
      TESSERA_CHECK(!is_table && (repair.kind == RepairKind::kMultiply || repair.kind == RepairKind::kAdd), name);
      for (int64_t i = 0; i < count; ++i) {
        float& x = values.as<float>()[i];
        x = static_cast<float>(x * repair.factor + repair.offset);
      }
    }
  }
}

}  // namespace tessera::doctor
