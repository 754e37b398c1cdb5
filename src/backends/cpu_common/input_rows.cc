// SPDX-License-Identifier: Apache-2.0
#include "backends/cpu_common/input_rows.h"

#include <algorithm>
#include <cstring>

#include "numeric/bf16.h"
#include "ops/linear/linear.h"

namespace tessera::backends::cpu_common {

using ops::InputMode;
using ops::WeightFormat;

PanelKernel PanelKernels::of(WeightFormat format) const {
  switch (format) {
    case WeightFormat::kNvfp4:
      return nvfp4;
    case WeightFormat::kFp8Block:
      return fp8;
    case WeightFormat::kBf16:
      return bf16;
    case WeightFormat::kF32:
      return f32;
  }
  return nullptr;
}

bool uses_tiles(const PanelKernels& kernels, int64_t num_tokens) {
  constexpr int64_t kManyTokens = 32;
  return kernels.takes_tiles && num_tokens >= kManyTokens;
}

float prepare_row(InputMode mode, const uint16_t* x, int64_t width, float bound, DType to, void* out) {
  if (mode == InputMode::kA16 && to == DType::kBF16) {
    std::memcpy(out, x, static_cast<size_t>(width) * 2);
    return 1;
  }
  float row[ops::kMaxLinearIn];
  float* values = to == DType::kF32 ? static_cast<float*>(out) : row;
  for (int64_t k = 0; k < width; ++k) values[k] = numeric::bf16_to_float(x[k]);
  const float factor = ops::prepare_input_row(mode, values, width, bound);
  if (to == DType::kBF16) {
    uint16_t* words = static_cast<uint16_t*>(out);
    for (int64_t k = 0; k < width; ++k) words[k] = numeric::bf16_from_float(values[k]);
  }
  return factor;
}

float prepare_tiled_row(InputMode mode, const uint16_t* x, int64_t width, float bound, int64_t row, int64_t num_rows,
                        char* tiles) {
  uint16_t prepared[ops::kMaxLinearIn];
  float factor = 1;
  if (mode != InputMode::kA16) {
    factor = prepare_row(mode, x, width, bound, DType::kBF16, prepared);
    x = prepared;
  }
  const int64_t first = row / kTileBlock * kTileBlock, rows = std::min(kTileBlock, num_rows - first);
  constexpr size_t kBytes = kTileSteps * 2;
  char* to = tiles + first * width * 2 + (row - first) * static_cast<int64_t>(kBytes);
  for (int64_t k = 0; k < width; k += kTileSteps, to += rows * static_cast<int64_t>(kBytes)) {
    std::memcpy(to, x + k, kBytes);
  }
  return factor;
}

float format_factor(WeightFormat format) {
  return format == WeightFormat::kNvfp4 ? kNvfp4ScaleUnit : 1.0f;
}

bool supports_panels(const PanelKernels& kernels, WeightFormat format, InputMode input, DType activation, int64_t in,
                     std::string& why_not) {
  if (input == InputMode::kF32 || activation != DType::kBF16) {
    why_not = "takes BF16 activations; f32 is computed by the reference";
  } else if (kernels.of(format) == nullptr) {
    why_not = "no kernel for " + std::string(ops::to_string(format)) + " weights";
  } else if (in % kernels.in_multiple != 0 || in > ops::kMaxLinearIn || in == 0) {
    why_not = "needs input features in multiples of " + std::to_string(kernels.in_multiple) + " up to " +
              std::to_string(ops::kMaxLinearIn) + ", not " + std::to_string(in);
  } else if (input == InputMode::kA4 && format != WeightFormat::kNvfp4) {
    why_not = "a4 is defined for NVFP4 weights only";
  } else {
    return true;
  }
  return false;
}

}  // namespace tessera::backends::cpu_common
