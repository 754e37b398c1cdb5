// SPDX-License-Identifier: Apache-2.0
#include "backends/cpu_common/linear.h"

#include <algorithm>

#include "backends/cpu_common/panel_layout.h"
#include "backends/cpu_common/share.h"
#include "base/integer_math.h"

namespace tessera::backends::cpu_common {

namespace {

using ops::Linear;

// From as many tokens on rows of x are copied to where they lie well, even if the kernel could take them as they are.
constexpr int64_t kManyTokens = 32;

int64_t token_bytes(const PanelKernels& kernels, const Linear::Desc& desc) {
  return desc.groups * desc.in * (dtype_bits(kernels.input) / 8);
}

// Whether the kernel reads x itself.
bool is_direct(const PanelKernels& kernels, const Linear::Desc& desc, int64_t num_tokens) {
  const int64_t bytes = token_bytes(kernels, desc);
  return desc.input == ops::InputMode::kA16 && kernels.input == DType::kBF16 &&
         (num_tokens < kManyTokens || padded_row_bytes(kernels, bytes) == bytes);
}

// Where x lies for the kernel, and one factor per token and group.
struct Inputs {
  const char* rows;
  int64_t token_stride, group_stride;  // bytes
  const float* factors;                // null: 1
};

Inputs prepare(const PanelKernels& kernels, const Linear::Desc& desc, const Linear::Args& args, device::Queue& queue) {
  const int64_t bytes = token_bytes(kernels, desc), row_bytes = bytes / desc.groups;
  if (is_direct(kernels, desc, args.num_tokens)) return {args.x.as<char>(), bytes, row_bytes, nullptr};
  const int64_t num_rows = args.num_tokens * desc.groups, stride = padded_row_bytes(kernels, bytes);
  float* factors = static_cast<float*>(args.workspace);
  char* rows = static_cast<char*>(args.workspace) + (num_rows * 4 + 63) / 64 * 64;
  const int64_t cost_of_value = desc.input == ops::InputMode::kA16 ? 1 : 16;
  share(queue, num_rows, num_rows * desc.in * cost_of_value, [&](int64_t i) {
    factors[i] = prepare_row(desc.input, args.x.as<uint16_t>() + i * desc.in, desc.in, 0, kernels.input,
                             rows + i / desc.groups * stride + i % desc.groups * row_bytes);
  });
  return {rows, stride, row_bytes, factors};
}

}  // namespace

bool linear_supports(const PanelKernels& kernels, const Linear::Desc& desc, std::string& why_not) {
  if (!supports_panels(kernels, desc.format, desc.input, desc.activation, desc.in, why_not)) return false;
  if (desc.groups > 1 && desc.out % kPanelRows != 0) {
    why_not = "needs groups of a multiple of 16 output features, not " + std::to_string(desc.out);
    return false;
  }
  return true;
}

int64_t linear_workspace(const PanelKernels& kernels, const Linear::Desc& desc, int64_t max_tokens) {
  if (is_direct(kernels, desc, max_tokens)) return 0;
  const int64_t factors = max_tokens * desc.groups * 4;
  return (factors + 63) / 64 * 64 + max_tokens * padded_row_bytes(kernels, token_bytes(kernels, desc));
}

void linear_run(const PanelKernels& kernels, const Linear::Desc& desc, const Linear::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return;
  const Inputs inputs = prepare(kernels, desc, args, queue);
  const PanelKernel kernel = kernels.of(desc.format);
  const float factor = args.weight.tensor_scale * format_factor(desc.format);
  const int64_t total_out = desc.groups * desc.out;
  // Panels of a group follow each other; with several groups each has whole panels.
  const int64_t panels_of_group = num_panels(desc.out), panels_all = desc.groups * panels_of_group;
  const int64_t row_pieces = ceil_div(args.num_tokens, kernels.job_rows);
  const bool has_enough = row_pieces * panels_all >= 4 * kJobPanels * queue.num_threads();
  const int64_t per_piece = has_enough ? kJobPanels : kJobPanels / 2;
  const int64_t pieces_of_group = ceil_div(panels_of_group, per_piece);
  const int64_t cost = std::max(args.weight.data_bytes(), args.num_tokens * total_out * desc.in / 16);

  share(queue, row_pieces * desc.groups * pieces_of_group, cost, [&](int64_t piece) {
    alignas(64) float sums[kJobPanels * kSumRows * kPanelRows];
    const int64_t pieces = desc.groups * pieces_of_group;
    const int64_t row_begin = piece / pieces * kernels.job_rows, group = piece % pieces / pieces_of_group;
    const int64_t first = piece % pieces_of_group * per_piece;
    PanelJob job{};
    job.num_panels = std::min(per_piece, panels_of_group - first);
    for (int64_t p = 0; p < job.num_panels; ++p) {
      job.panels[p] = panel_of(args.weight, group * panels_of_group + first + p);
    }
    job.cols = desc.in;
    job.rows = inputs.rows + row_begin * inputs.token_stride + group * inputs.group_stride;
    job.row_stride = inputs.token_stride;
    job.num_rows = std::min(kernels.job_rows, args.num_tokens - row_begin);
    job.sums = sums;
    kernel(job);
    float factors[kJobRows];
    for (int64_t t = 0; t < job.num_rows; ++t) {
      const int64_t row = (row_begin + t) * desc.groups + group;
      factors[t] = inputs.factors == nullptr ? factor : inputs.factors[row] * factor;
    }
    const int64_t width = desc.output == DType::kF32 ? 4 : 2;
    kernels.store({.sums = sums,
                   .num_panels = job.num_panels,
                   .num_rows = job.num_rows,
                   .factors = factors,
                   .out = args.y.as<char>() + (row_begin * total_out + group * desc.out) * width,
                   .is_f32 = desc.output == DType::kF32,
                   .row_elements = total_out,
                   .row_ids = nullptr,
                   .first_n = first * kPanelRows,
                   .end_n = desc.out});
  });
}

}  // namespace tessera::backends::cpu_common
