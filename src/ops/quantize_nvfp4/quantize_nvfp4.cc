// SPDX-License-Identifier: Apache-2.0
#include "ops/quantize_nvfp4/quantize_nvfp4.h"

#include <fmt/format.h>

#include <vector>

#include "ops/reference_rows.h"

namespace tessera::ops {

namespace {

using Rule = QuantizeNvfp4::Rule;

// Calls visit(row number, its values) for all rows, several at once.
template <class Visit>
void for_rows(const TensorView& x, device::Queue& queue, const Visit& visit) {
  const int64_t width = x.shape[1];
  queue.parallel_for(x.shape[0], 1 + 4096 / width, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(width));
    for (int64_t r = begin; r < end; ++r) {
      load_floats(x, r * width, width, row.data());
      visit(r, row.data());
    }
  });
}

}  // namespace

std::string QuantizeNvfp4::Desc::to_string() const {
  const char* name = rule == Rule::kRows ? "rows" : rule == Rule::kTensor ? "tensor" : "four over six";
  return fmt::format("{} {}", name, dtype_name(dtype));
}

bool quantize_nvfp4_reference_supports(const QuantizeNvfp4::Desc& desc, std::string& why_not) {
  if (desc.dtype == DType::kF32 || desc.dtype == DType::kBF16) return true;
  why_not = fmt::format("{} input", dtype_name(desc.dtype));
  return false;
}

void quantize_nvfp4_reference(const QuantizeNvfp4::Desc& desc, const QuantizeNvfp4::Args& args, device::Queue& queue) {
  const int64_t num_rows = args.x.shape[0], width = args.x.shape[1];
  if (num_rows == 0) return;
  float global = 0;
  if (desc.rule != Rule::kRows) {
    std::vector<float> largest(static_cast<size_t>(num_rows));
    for_rows(args.x, queue,
             [&](int64_t r, const float* row) { largest[static_cast<size_t>(r)] = numeric::abs_max(row, width); });
    global = global_scale(desc.rule, numeric::abs_max(largest.data(), num_rows));
    args.globals[0] = global;
  }
  for_rows(args.x, queue, [&](int64_t r, const float* row) {
    float g = global;
    if (desc.rule == Rule::kRows) {
      g = global_scale(desc.rule, numeric::abs_max(row, width));
      args.globals[r] = g;
    }
    quantize_values(desc.rule, row, width, g, args.codes + r * (width / 2),
                    args.scales + r * (width / numeric::kNvfp4Block));
  });
}

}  // namespace tessera::ops
