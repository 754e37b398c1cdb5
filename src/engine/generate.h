// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs one sequence from its prompt to its end: what every verb that generates uses.
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/log.h"
#include "engine/sampler.h"
#include "engine/sequence.h"
#include "engine/token_constraint.h"

namespace tessera::engine {

struct GenerateOptions {
  int64_t max_tokens = 256;  // 0: only the prompt is run
  SamplingOptions sampling{};
  const ConstraintSource* constraint = nullptr;  // null: any token may be drawn
  bool stop_at_end_token = true;
  const std::atomic<bool>* cancel = nullptr;  // looked at between steps; null: never
  bool shows_decode = false;                  // progress covers decoding too: for who does not stream tokens
  // Not null: takes a mark of the state before the prompt's last token is run, where the prompt gets that far.
  std::unique_ptr<model::StateMark>* mark_before_last = nullptr;
};

// Sees what happens, step by step. The loop calls it from its own thread.
class GenerateObserver {
 public:
  virtual ~GenerateObserver() = default;
  // True: logits of every position that is run are wanted, else none.
  virtual bool wants_logits() const { return false; }
  // Rows [count, vocab] for the positions [first_position, first_position + count) just run: row i predicts the token
  // at first_position + i + 1.
  virtual void logits(int64_t first_position, std::span<const float> rows) { (void)first_position, (void)rows; }
  // A token was drawn. False ends the sequence (a stop string was found).
  virtual bool token(int32_t id) = 0;
};

struct GenerateTimes {
  double prefill_seconds = 0, decode_seconds = 0;
};

struct GenerateResult {
  std::vector<int32_t> ids;  // drawn, the end token included
  FinishReason finish_reason = FinishReason::kNone;
  int64_t num_prompt_tokens = 0;  // that were run: fewer than the prompt has where it was cancelled
  GenerateTimes times;
};

// `prompt` is not empty. Throws kInvalidArgument where the prompt has an id out of range, is longer than the model's
// longest sequence, or an option has a fault. `progress` of the prefill (and decode, see GenerateOptions) may be null.
// max_tokens is cut to what the longest sequence leaves; the reason is then kLength.
GenerateResult generate(model::Runner& runner, std::span<const int32_t> prompt, const GenerateOptions& options,
                        GenerateObserver& observer, ProgressSink* progress);

// The same for a sequence whose state may have seen a beginning of the prompt already, though not all of it (else there
// are no logits to draw from: kInvalidArgument). max_tokens is cut to what the state's capacity leaves as well.
GenerateResult generate(model::Runner& runner, Sequence& sequence, const GenerateOptions& options,
                        GenerateObserver& observer, ProgressSink* progress);

}  // namespace tessera::engine
