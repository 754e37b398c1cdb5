// SPDX-License-Identifier: Apache-2.0
#include "backends/cpu_common/linear.h"

#include <algorithm>

#include "backends/cpu_common/panel_layout.h"
#include "backends/cpu_common/share.h"
#include "base/integer_math.h"

namespace tessera::backends::cpu_common {

namespace {

using ops::Linear;

int64_t token_bytes(const PanelKernels& kernels, const Linear::Desc& desc) {
  return desc.groups * desc.in * (dtype_bits(kernels.input) / 8);
}

// Whether the kernel reads x itself.
bool is_direct(const PanelKernels& kernels, const Linear::Desc& desc, int64_t num_tokens) {
  return desc.input == ops::InputMode::kA16 && kernels.input == DType::kBF16 && !uses_tiles(kernels, num_tokens);
}

// Where x lies for the kernel, and one factor per token and group.
struct Inputs {
  const char* rows;
  int64_t token_stride, group_stride;  // bytes; in tiles a group's tokens lie together
  const float* factors;                // null: 1
};

Inputs prepare(const PanelKernels& kernels, const Linear::Desc& desc, const Linear::Args& args, device::Queue& queue) {
  const int64_t bytes = token_bytes(kernels, desc), row_bytes = bytes / desc.groups;
  if (is_direct(kernels, desc, args.num_tokens)) return {args.x.as<char>(), bytes, row_bytes, nullptr};
  const int64_t num_rows = args.num_tokens * desc.groups, group_bytes = args.num_tokens * row_bytes;
  float* factors = static_cast<float*>(args.workspace);
  char* rows = static_cast<char*>(args.workspace) + (num_rows * 4 + 63) / 64 * 64;
  const int64_t cost = num_rows * desc.in * (desc.input == ops::InputMode::kA16 ? 1 : 16);
  const uint16_t* x = args.x.as<uint16_t>();
  if (!uses_tiles(kernels, args.num_tokens)) {
    share(queue, num_rows, cost, [&](int64_t i) {
      factors[i] = prepare_row(desc.input, x + i * desc.in, desc.in, 0, kernels.input, rows + i * row_bytes);
    });
    return {rows, bytes, row_bytes, factors};
  }
  share(queue, num_rows, cost, [&](int64_t i) {
    const int64_t t = i % args.num_tokens, group = i / args.num_tokens, row = t * desc.groups + group;
    factors[row] =
        prepare_tiled_row(desc.input, x + row * desc.in, desc.in, 0, t, args.num_tokens, rows + group * group_bytes);
  });
  return {rows, row_bytes, group_bytes, factors};
}

JobShape shape_of(const PanelKernels& kernels, const Linear::Desc& desc, int64_t num_tokens, int num_threads) {
  const auto count = [&](const JobShape& shape) {
    return ceil_div(num_tokens, shape.rows) * desc.groups * ceil_div(num_panels(desc.out), shape.panels);
  };
  if (uses_tiles(kernels, num_tokens)) return many_rows_shape(kernels, kernels.job_panels, num_threads, count);
  const JobShape wide{kFewPanels, kernels.job_rows};
  return count(wide) >= 4 * num_threads ? wide : JobShape{kFewPanels / 2, kernels.job_rows};
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
  return (factors + 63) / 64 * 64 + max_tokens * token_bytes(kernels, desc);
}

void linear_run(const PanelKernels& kernels, const Linear::Desc& desc, const Linear::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return;
  const Inputs inputs = prepare(kernels, desc, args, queue);
  const PanelKernel kernel = kernels.of(desc.format);
  const float factor = args.weight.tensor_scale * format_factor(desc.format);
  const int64_t total_out = desc.groups * desc.out;
  // Panels of a group follow each other; with several groups each has whole panels.
  const int64_t panels_of_group = num_panels(desc.out);
  const JobShape shape = shape_of(kernels, desc, args.num_tokens, queue.num_threads());
  const int64_t row_pieces = ceil_div(args.num_tokens, shape.rows);
  const int64_t pieces_of_group = ceil_div(panels_of_group, shape.panels);
  const int64_t cost = std::max(args.weight.data_bytes(), args.num_tokens * total_out * desc.in / 16);

  share(queue, row_pieces * desc.groups * pieces_of_group, cost, [&](int64_t piece) {
    alignas(64) float sums[kJobPanels * kSumRows * kPanelRows];
    const int64_t pieces = desc.groups * pieces_of_group;
    const int64_t row_begin = piece / pieces * shape.rows, group = piece % pieces / pieces_of_group;
    const int64_t first = piece % pieces_of_group * shape.panels;
    PanelJob job{};
    job.num_panels = std::min(shape.panels, panels_of_group - first);
    for (int64_t p = 0; p < job.num_panels; ++p) {
      job.panels[p] = panel_of(args.weight, group * panels_of_group + first + p);
    }
    job.cols = desc.in;
    job.rows = inputs.rows + row_begin * inputs.token_stride + group * inputs.group_stride;
    job.row_stride = inputs.token_stride;
    job.is_tiled = uses_tiles(kernels, args.num_tokens);
    job.num_rows = std::min(shape.rows, args.num_tokens - row_begin);
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
