// SPDX-License-Identifier: Apache-2.0
#pragma once
// Token ids to residual streams: out[t][s] = weight[ids[t]] for every stream s.
// Source: DeepSeek-V4 inference/model.py, Transformer.forward (the streams start as copies of the embedding).
#include <cstdint>
#include <string>

#include "ops/variant.h"
#include "tensor/tensor_view.h"

namespace tessera::ops {

struct Embedding {
  static constexpr const char* kName = "embedding";
  struct Desc {
    int64_t vocab = 0, hidden = 0, streams = 4;
    DType weight = DType::kBF16;  // kBF16 or kF32
    DType activation = DType::kBF16;
    std::string to_string() const;
  };
  struct Args {
    TensorView weight;  // [vocab, hidden]
    const int32_t* ids =
        nullptr;  // [tokens], each below vocab: the caller has checked. Below 0, where none was drawn: as 0
    int64_t num_tokens = 0;
    TensorView out;  // [tokens, streams, hidden] activation
  };
};

void embedding_reference(const Embedding::Desc& desc, const Embedding::Args& args, device::Queue& queue);

}  // namespace tessera::ops
