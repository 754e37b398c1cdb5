// SPDX-License-Identifier: Apache-2.0
// Quantisation, which has no state but the kernels that were chosen.
#include <fmt/format.h>

#include <cmath>
#include <vector>

#include "base/error.h"
#include "bindings/c/boundary.h"
#include "ops/reference_rows.h"

using namespace tessera;
using namespace tessera::bindings;

namespace {

// A weight in the host's memory is looked at before anything is written.
void check_finite(const TensorView& x) {
  std::vector<float> row(static_cast<size_t>(x.shape[1]));
  for (int64_t r = 0; r < x.shape[0]; ++r) {
    ops::load_floats(x, r * x.shape[1], x.shape[1], row.data());
    if (std::isfinite(numeric::abs_max(row.data(), x.shape[1]))) continue;
    fail(ErrorCode::kNotFinite, fmt::format("x: row {} of a weight holds NaN or infinity", r));
  }
}

ops::QuantizeNvfp4::Rule rule_of(tessera_nvfp4_rule rule) {
  switch (rule) {
    case TESSERA_NVFP4_ROWS:
      return ops::QuantizeNvfp4::Rule::kRows;
    case TESSERA_NVFP4_TENSOR:
      return ops::QuantizeNvfp4::Rule::kTensor;
    case TESSERA_NVFP4_TENSOR_FOUR_OVER_SIX:
      return ops::QuantizeNvfp4::Rule::kFourOverSix;
    default:
      fail(ErrorCode::kInvalidArgument, fmt::format("rule: expected a TESSERA_NVFP4_ value, found {}", rule));
  }
}

}  // namespace

extern "C" {

tessera_status tessera_quantize_nvfp4(tessera_context* context, tessera_nvfp4_rule rule, tessera_dtype dtype,
                                      const void* x, int64_t rows, int64_t cols, uint8_t* codes, uint8_t* scales,
                                      float* globals) {
  return guarded([&] {
    check_not_null(context, "context");
    const ops::QuantizeNvfp4::Desc desc{rule_of(rule), dtype_of(dtype, "dtype")};
    check_size(rows, 0, kMaxSize, "rows");
    check_size(cols, numeric::kNvfp4Block, kMaxSize, "cols");
    check_flag(cols % numeric::kNvfp4Block == 0, "cols", "a multiple of 16", cols);
    if (rows == 0) return;
    check_pointer(x, desc.dtype == DType::kF32 ? 4 : 2, "x");
    check_not_null(codes, "codes");
    check_not_null(scales, "scales");
    check_pointer(globals, alignof(float), "globals");
    const TensorView view{const_cast<void*>(x), desc.dtype, {rows, cols}};
    if (context->memory().is_host() && rule != TESSERA_NVFP4_ROWS) check_finite(view);
    context->executor->make_current();
    const auto key = std::pair{rule, dtype};
    auto found = context->quantizers.find(key);
    if (found == context->quantizers.end()) {
      found = context->quantizers.emplace(key, context->planner().bind<ops::QuantizeNvfp4>("quantize", desc)).first;
    }
    found->second.run({view, codes, scales, globals}, context->queue());
  });
}
}
