// SPDX-License-Identifier: Apache-2.0
#pragma once
// out[t][s] = z[t][s] + e[t] for every stream s: how the draft block joins the next token's embedding to the streams.
// FP32 sum, rounded when stored.
// Source: DeepSeek-V4 inference/model.py, MTPBlock.forward.
#include <cstdint>
#include <string>

#include "ops/variant.h"
#include "tensor/tensor_view.h"

namespace tessera::ops {

struct StreamAdd {
  static constexpr const char* kName = "stream_add";
  struct Desc {
    int64_t hidden = 0, streams = 4;
    DType activation = DType::kBF16;
    std::string to_string() const;
  };
  struct Args {
    TensorView z;    // [tokens, streams, hidden]
    TensorView e;    // [tokens, hidden]
    TensorView out;  // [tokens, streams, hidden]; may be z
    int64_t num_tokens = 0;
  };
};

void stream_add_reference(const StreamAdd::Desc& desc, const StreamAdd::Args& args, device::Queue& queue);

}  // namespace tessera::ops
