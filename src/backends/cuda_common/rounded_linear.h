// SPDX-License-Identifier: Apache-2.0
#pragma once
// `linear` in `a4` and `a8` by a variant for plain BF16 inputs: rows are rounded first, which is exact in BF16. In `a4`
// sums come back in FP32 and are multiplied by the row's factor when they are stored.
#include <string>

#include "backends/cuda_common/input_rows.h"
#include "backends/cuda_common/workspace.h"
#include "ops/linear/linear.h"

namespace tessera::backends::cuda_common {

// y[t][g * out + i] = factors[t][g] * sums[t][g * out + i], of FP32 sums. A row of `desc` has desc.groups of them.
void scale_outputs(const ops::Linear::Desc& desc, int64_t num_tokens, const float* sums, const float* factors,
                   const TensorView& y, const device::Queue& queue);

template <const ops::Variant<ops::Linear>& kPlain>
class RoundedLinear {
  using Desc = ops::Linear::Desc;
  using Args = ops::Linear::Args;

 public:
  static constexpr ops::Variant<ops::Linear> variant(const char* name) {
    return {name, supports, kPlain.packed_layout, workspace_bytes, run};
  }

 private:
  struct Parts {
    uint16_t* rows;         // [tokens, groups * in]
    float *factors, *sums;  // [tokens, groups], [tokens, groups * out]; where rows have factors
    char* rest;             // the variant's own
  };

  static Desc plain(Desc desc) {
    if (has_row_factors(desc.input)) desc.output = DType::kF32;
    desc.input = ops::InputMode::kA16;
    return desc;
  }

  static int64_t lay_out(const Desc& desc, int64_t num_tokens, void* base, Parts& parts) {
    Workspace workspace(base);
    const int64_t num_scaled = has_row_factors(desc.input) ? num_tokens * desc.groups : 0;
    parts.rows = workspace.take<uint16_t>(num_tokens * desc.groups * desc.in);
    parts.factors = workspace.take<float>(num_scaled);
    parts.sums = workspace.take<float>(num_scaled * desc.out);
    const Desc inner = plain(desc);
    parts.rest =
        workspace.take<char>(kPlain.workspace_bytes == nullptr ? 0 : kPlain.workspace_bytes(inner, num_tokens));
    return workspace.used();
  }

  static bool supports(const Desc& desc, std::string& why_not) {
    if (needs_input_rows(desc.input) && desc.activation == DType::kBF16) return kPlain.supports(plain(desc), why_not);
    why_not = "inputs are not BF16 to be rounded (a4, a8)";
    return false;
  }

  static int64_t workspace_bytes(const Desc& desc, int64_t max_tokens) {
    Parts parts{};
    return lay_out(desc, max_tokens, nullptr, parts);
  }

  static void run(const Desc& desc, const Args& args, device::Queue& queue) {
    if (args.num_tokens == 0) return;
    Parts parts{};
    lay_out(desc, args.num_tokens, args.workspace, parts);
    const bool is_scaled = has_row_factors(desc.input);
    Args of_plain = args;
    of_plain.x = {parts.rows, DType::kBF16, args.x.shape};
    if (is_scaled) of_plain.y = {parts.sums, DType::kF32, args.y.shape};
    of_plain.workspace = parts.rest;
    prepare_input_rows(desc.input, args.x, args.num_tokens * desc.groups, desc.in, nullptr, of_plain.x,
                       is_scaled ? parts.factors : nullptr, queue);
    kPlain.run(plain(desc), of_plain, queue);
    if (is_scaled) scale_outputs(desc, args.num_tokens, parts.sums, parts.factors, args.y, queue);
  }
};

}  // namespace tessera::backends::cuda_common
