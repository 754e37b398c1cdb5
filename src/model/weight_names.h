// SPDX-License-Identifier: Apache-2.0
#pragma once
// Official tensor names and those of Hugging Face transformers, matched whole, never by substring.
// Source: transformers 5.17 conversion_mapping.py and modeling_deepseek_v4.py.
#include <string>
#include <string_view>
#include <vector>

namespace tessera::model {

// The Hugging Face names of an official name, the current one first: revisions of transformers and converters differ in
// where they put the indexer. Empty for what transformers does not have (draft blocks).
std::vector<std::string> hf_names(std::string_view official);

// The current Hugging Face name of an official name (with or without ".weight"); experts one by one
// (model.layers.N.mlp.experts.E.gate_proj). Empty for what transformers does not have (draft blocks).
std::string hf_name(std::string_view official);

// Where experts are fused: the tensor that holds an expert's matrix, and which part of its rows.
struct FusedExpert {
  std::string tensor;  // model.layers.N.mlp.experts.gate_up_proj [E, 2 I, d] or down_proj [E, d, I]
  int64_t expert = 0;
  int64_t part = 0;  // gate_up_proj: 0 gate (w1), 1 up (w3)
  int64_t parts = 1;
};
// `official` is "layers.N.ffn.experts.E.w1" (or w2, w3); an empty tensor name otherwise.
FusedExpert hf_fused_expert(std::string_view official);

}  // namespace tessera::model
