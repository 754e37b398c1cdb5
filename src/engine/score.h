// SPDX-License-Identifier: Apache-2.0
#pragma once
// How well the model foretells a given text: what perplexity is made of.
#include <atomic>
#include <cstdint>
#include <span>

#include "base/log.h"
#include "model/runner.h"

namespace tessera::engine {

// Minus the logarithm of the probability of one token of a row of FP32 logits [vocab], in FP64: log-sum-exp less the
// token's logit. `id` lies in [0, vocab).
double negative_log_likelihood(std::span<const float> logits, int32_t id);

struct TextScore {
  double nats = 0;         // sum over the scored tokens
  int64_t num_tokens = 0;  // scored: all but the first, which nothing foretells
  // exp(nats / num_tokens); 1 without tokens.
  double perplexity() const;
};

// Runs `ids` as a sequence of its own, each token given those before it. `progress` (null: none) advances by tokens;
// begin and end are the caller's. `cancel` (null: never) is looked at between steps; then the score is of what was run.
// Throws kInvalidArgument where ids are out of range or more than the longest sequence.
TextScore score_text(model::Runner& runner, std::span<const int32_t> ids, ProgressSink* progress,
                     const std::atomic<bool>* cancel);

}  // namespace tessera::engine
