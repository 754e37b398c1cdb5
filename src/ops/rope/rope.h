// SPDX-License-Identifier: Apache-2.0
#pragma once
// Rotary positions on the last rope_dim values of each vector, interleaved pairs (2i, 2i+1), in place.
//   forward: (a, b) -> (a cos - b sin, a sin + b cos);  inverse: the conjugate.
//   angle = fl32(position * frequency_i); sine and cosine of that FP32 angle, correctly range-reduced.
// Source: DeepSeek-V4 inference/model.py, apply_rotary_emb and precompute_freqs_cis; YaRN: arXiv 2309.00071.
#include <cstdint>
#include <string>
#include <vector>

#include "ops/variant.h"
#include "tensor/tensor_view.h"

namespace tessera::ops {

struct Rope {
  static constexpr const char* kName = "rope";
  struct Desc {
    int64_t vectors = 1;   // vectors per token (heads), all at the token's position
    int64_t width = 0;     // of a vector
    int64_t rope_dim = 0;  // even, at most width
    bool is_inverse = false;
    DType activation = DType::kBF16;
    std::string to_string() const;
  };
  struct Args {
    TensorView x;                        // [tokens, vectors, width] activation, in place
    const int64_t* positions = nullptr;  // [tokens]
    const float* frequencies = nullptr;  // [rope_dim / 2]
    int64_t num_tokens = 0;
  };
};

// Static YaRN, applied at every position and length; no magnitude factor.
struct Yarn {
  double factor = 16, beta_fast = 32, beta_slow = 1;
  double original_max_positions = 65536;
};

// FP32 frequencies theta^(-2i / rope_dim), i < rope_dim / 2; blended by YaRN where `yarn` is not null.
std::vector<float> rope_frequencies(int64_t rope_dim, double theta, const Yarn* yarn);

bool rope_reference_supports(const Rope::Desc& desc, std::string& why_not);
void rope_reference(const Rope::Desc& desc, const Rope::Args& args, device::Queue& queue);

}  // namespace tessera::ops
