// SPDX-License-Identifier: Apache-2.0
#pragma once
// In place, x <- H x / sqrt(width) with the Sylvester-ordered Walsh-Hadamard matrix H[a][b] = (-1)^popcount(a & b).
// FP32 inside, rounded when stored. With `is_fp4` the result then goes through E2M1 by 32 with power-of-two scales and
// back: what the indexer's queries are multiplied as.
// Source: DeepSeek-V4 inference/model.py, rotate_activation and fp4_act_quant in Indexer.forward.
#include <cstdint>
#include <string>

#include "ops/variant.h"
#include "tensor/tensor_view.h"

namespace tessera::ops {

struct Hadamard {
  static constexpr const char* kName = "hadamard";
  struct Desc {
    int64_t width = 0;  // a power of two; a multiple of 32 with is_fp4
    bool is_fp4 = false;
    DType activation = DType::kBF16;
    std::string to_string() const;
  };
  struct Args {
    TensorView x;  // [num_rows, width] activation, in place
    int64_t num_rows = 0;
  };
};

constexpr int64_t kMaxHadamardWidth = 4096;
bool hadamard_reference_supports(const Hadamard::Desc& desc, std::string& why_not);
void hadamard_reference(const Hadamard::Desc& desc, const Hadamard::Args& args, device::Queue& queue);

}  // namespace tessera::ops
