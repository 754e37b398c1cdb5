// SPDX-License-Identifier: Apache-2.0
#pragma once
// A weight matrix of a linear map as the checkpoint has it. value[n][k] = code * block_scale * tensor_scale.
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::ops {

enum class WeightFormat : uint8_t {
  kF32,
  kBf16,
  kFp8Block,  // E4M3 codes [n, k]; F32 scales [ceil(n/128), ceil(k/128)]
  kNvfp4,     // E2M1 codes [n, k/2], even k in the low nibble; E4M3 scales [n, k/16]; one F32 for the tensor
};

std::string_view to_string(WeightFormat format);

struct WeightView {
  WeightFormat format = WeightFormat::kF32;
  int64_t rows = 0;  // n: output features
  int64_t cols = 0;  // k: input features
  const void* data = nullptr;
  const void* block_scales = nullptr;  // null for kF32 and kBf16
  float tensor_scale = 1;              // 1 except for kNvfp4
  // kFp8Block: every scale is one that folds (numeric::fp8_scale_folds) and no code is NaN, so that kernels may
  // multiply codes by their scales before they sum. False: not so, or nobody has looked.
  bool scales_fold = false;

  // Bytes of `data` and of `block_scales` in the checkpoint's layout.
  int64_t data_bytes() const;
  int64_t scale_bytes() const;
  // Rows [row_begin, row_end) of the matrix; for kFp8Block row_begin must be a multiple of 128.
  WeightView slice_rows(int64_t row_begin, int64_t row_end) const;
};

// What WeightView::scales_fold says, of a matrix in the checkpoint's layout in host memory.
bool do_scales_fold(const WeightView& weight);

}  // namespace tessera::ops
