// SPDX-License-Identifier: Apache-2.0
#pragma once
// Inputs of a linear map as a panel kernel wants them: BF16 or FP32, rounded as the mode says.
#include <cstdint>
#include <string>

#include "backends/cpu_common/panel.h"
#include "ops/precision.h"
#include "ops/weight_view.h"

namespace tessera::backends::cpu_common {

// The kernels of one variant.
struct PanelKernels {
  DType input;                        // of x: kBF16 or kF32
  int64_t in_multiple;                // input features come in multiples of this
  int64_t job_rows;                   // rows of x of a job at most: as many as the second-level cache holds
  PanelKernel nvfp4, fp8, bf16, f32;  // null: the format is left to another variant
  StoreKernel store;
  GateKernel gate;
  int64_t row_padding = 0;  // bytes behind a row of x, see padded_row_bytes(); a multiple of 64
  PanelKernel of(ops::WeightFormat format) const;
};

// Bytes from one row of x to the next where rows are laid out for the kernel. Rows whose size is a multiple of 2 KiB
// would lie in the same few sets of a cache; the padding of `kernels` then spreads those that a tile takes together.
int64_t padded_row_bytes(const PanelKernels& kernels, int64_t row_bytes);

// A row of `width` BF16 values -> what the multiply sees of it in `mode`, as `to` (exact in BF16 in every mode);
// returns the factor of the row's sums. `bound` as in ops::prepare_input_row.
float prepare_row(ops::InputMode mode, const uint16_t* x, int64_t width, float bound, DType to, void* out);

// Factor of every sum by a weight of that format, besides row and tensor.
float format_factor(ops::WeightFormat format);

// What all panel variants need of a linear map.
bool supports_panels(const PanelKernels& kernels, ops::WeightFormat format, ops::InputMode input, DType activation,
                     int64_t in, std::string& why_not);

}  // namespace tessera::backends::cpu_common
