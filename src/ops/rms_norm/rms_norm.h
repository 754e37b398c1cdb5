// SPDX-License-Identifier: Apache-2.0
#pragma once
// out = weight * (x * rsqrt(mean(x^2) + eps)), FP32 inside, one rounding when stored. Without a weight: the per-head
// normalisation of queries.
// Source: DeepSeek-V4 inference/model.py, RMSNorm and Attention.forward.
#include <cstdint>
#include <string>

#include "ops/variant.h"
#include "tensor/tensor_view.h"

namespace tessera::ops {

struct RmsNorm {
  static constexpr const char* kName = "rms_norm";
  struct Desc {
    int64_t width = 0;
    float eps = 1e-6f;
    DType activation = DType::kBF16;
    std::string to_string() const;
  };
  struct Args {
    TensorView x;       // [rows, width] activation
    TensorView weight;  // [width] BF16 or F32; data null: none
    TensorView out;     // [rows, width] activation; may be x
    int64_t num_rows = 0;
  };
};

bool rms_norm_reference_supports(const RmsNorm::Desc& desc, std::string& why_not);
void rms_norm_reference(const RmsNorm::Desc& desc, const RmsNorm::Args& args, device::Queue& queue);

}  // namespace tessera::ops
