// SPDX-License-Identifier: Apache-2.0
#pragma once
// A token from each of some rows of FP32 logits. Order: logit bias, penalties, the mask, then greedy where temperature
// is 0 (largest logit, ties to the lower id), else temperature, top-k, min-p, top-p, and a draw with a uniform number
// that depends on (seed, position) alone. What a row gets depends on nothing but the row and its mask.
//   mask        a token whose bit is 0 is treated as one with a logit of minus infinity; logits are not changed by it
//   penalties   repetition: logit > 0 ? logit / r : logit * r; then logit -= frequency * count + presence * (count > 0)
//   top-k       the k largest, ties to the lower id; 0 or >= vocab: all
//   min-p       keep probability >= min_p * the largest
//   top-p       in falling probability (ties: lower id), the shortest prefix whose sum reaches top_p
// Probabilities and their running sums are FP64, in falling order, so the draw is exact and repeatable.
// Source: the parameters' usual meaning in the OpenAI API and in Hugging Face transformers' logits processors.
#include <cstdint>
#include <string>

#include "base/host_device.h"
#include "ops/variant.h"

namespace tessera::ops {

struct SamplingParams {
  float temperature = 0;
  float top_p = 1;
  float min_p = 0;
  int32_t top_k = 0;
  float repetition_penalty = 1, frequency_penalty = 0, presence_penalty = 0;
  uint64_t seed = 0;
};

// How a token is drawn.
struct SampleRow {
  SamplingParams params;
  uint64_t position = 0;  // of the token
  int32_t logit_row = 0;  // from which it is drawn
  int32_t mask_row = -1;  // of the tokens that may be drawn; -1: all
};

// Words of a mask over so many tokens.
TESSERA_HOST_DEVICE constexpr int64_t mask_words(int64_t vocab) {
  return (vocab + 31) / 32;
}

struct Sample {
  static constexpr const char* kName = "sample";
  struct Desc {
    int64_t vocab = 0;
    std::string to_string() const;
  };
  struct Args {
    float* logits = nullptr;          // [rows that are named, vocab]; changed by bias and penalties
    const SampleRow* rows = nullptr;  // [num_rows]
    int64_t num_rows = 0;
    // Of a call of one row; more have neither, and their penalties do nothing.
    const int32_t* counts = nullptr;     // [vocab] occurrences for penalties; null: none
    const int32_t* bias_ids = nullptr;   // [num_bias], each in [0, vocab)
    const float* bias_values = nullptr;  // [num_bias]
    int64_t num_bias = 0;
    const uint32_t* masks = nullptr;  // [rows that are named, mask_words(vocab)]: bit id % 32 of word id / 32
    int32_t* tokens = nullptr;        // out [num_rows]; -1 where every logit is NaN, minus infinity or masked
    void* workspace = nullptr;
  };
};

int64_t sample_reference_workspace(const Sample::Desc& desc, int64_t max_rows);
void sample_reference(const Sample::Desc& desc, const Sample::Args& args, device::Queue& queue);

}  // namespace tessera::ops
