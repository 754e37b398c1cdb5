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
  int64_t job_panels = 4;    // of a job of many rows, at most: x is read once for them
  bool takes_tiles = false;  // many rows of x are laid out in tiles (panel.h); job_rows is a multiple of 64 then
  PanelKernel of(ops::WeightFormat format) const;
};

// Whether rows of x for so many tokens are laid out in tiles. Fewer are read where they are.
bool uses_tiles(const PanelKernels& kernels, int64_t num_tokens);

// How the work is cut: panels and rows of a job. `count(shape)` tells how many jobs that makes; many tokens take as
// many panels as leave every thread a few jobs, since x is read once for all of them.
struct JobShape {
  int64_t panels, rows;
};
constexpr int64_t kFewPanels = 4;  // of a job of few rows, at most
template <class Count>
JobShape many_rows_shape(const PanelKernels& kernels, int64_t max_panels, int num_threads, const Count& count) {
  constexpr int64_t kJobsOfThread = 3;
  const int64_t wanted = kJobsOfThread * num_threads;
  JobShape shape{max_panels, kernels.job_rows};
  while (shape.panels > kFewPanels && count(shape) < wanted) shape.panels /= 2;
  if (count(shape) >= wanted) return shape;
  const JobShape lower{shape.panels, kernels.job_rows / 2};
  if (count(lower) >= 2 * num_threads && count(lower) > count(shape)) return lower;
  return {shape.panels / 2, kernels.job_rows};
}

// A row of `width` BF16 values -> what the multiply sees of it in `mode`, as `to` (exact in BF16 in every mode);
// returns the factor of the row's sums. `bound` as in ops::prepare_input_row.
float prepare_row(ops::InputMode mode, const uint16_t* x, int64_t width, float bound, DType to, void* out);

// The same as row `row` of `num_rows` rows in tiles, whose width is a multiple of 32.
float prepare_tiled_row(ops::InputMode mode, const uint16_t* x, int64_t width, float bound, int64_t row,
                        int64_t num_rows, char* tiles);

// Factor of every sum by a weight of that format, besides row and tensor.
float format_factor(ops::WeightFormat format);

// What all panel variants need of a linear map.
bool supports_panels(const PanelKernels& kernels, ops::WeightFormat format, ops::InputMode input, DType activation,
                     int64_t in, std::string& why_not);

}  // namespace tessera::backends::cpu_common
