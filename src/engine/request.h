// SPDX-License-Identifier: Apache-2.0
#pragma once
// What is asked of the engine, and what it answers with: token ids in, token ids out.
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/priority.h"
#include "engine/sampler.h"
#include "engine/sequence.h"
#include "engine/token_constraint.h"

namespace tessera::engine {

// Rises in the order of submission.
using RequestId = uint64_t;

inline constexpr int kMaxChoices = 16;
inline constexpr int kMaxTopLogprobs = 20;

struct Request {
  std::vector<int32_t> prompt;  // at least one token
  int64_t max_tokens = 256;     // 0: only the prompt is run. Cut to what the longest sequence leaves
  SamplingOptions sampling{};
  std::shared_ptr<const ConstraintSource> constraint{};  // null: any token may be drawn
  // Where there is no constraint, the tokens that may be drawn, as TokenConstraint::allowed names them; null: all. The
  // same memory for many requests costs a step no more than for one.
  std::shared_ptr<const std::vector<uint32_t>> allowed{};
  int num_choices = 1;                   // 1 to kMaxChoices; choice i draws as a request alone with seed + i would
  bool stop_at_end_token = true;         // the model's end tokens
  std::vector<int32_t> stop_ids{};       // more tokens that end a choice; the token is delivered
  std::optional<int> logprobs{};         // of drawn tokens, with so many of the likeliest, 0 to kMaxTopLogprobs
  std::optional<int> prompt_logprobs{};  // the same of the prompt's tokens but the first
  // Positions, rising, where another prompt may depart from this one (ends of messages): a PrefixStore keeps states
  // there.
  std::vector<int64_t> boundaries{};
  std::string cache_salt{};  // what a PrefixStore has of another salt is not found
  uint64_t client = 0;       // clients share the model evenly
  Priority priority = Priority::kNormal;
};

// What is wrong with a request for a model, in words with field, expected and found; nothing where it is fine.
std::optional<std::string> find_fault(const Request& request, const model::ModelFacts& facts);

// Tokens that a sequence of the request may come to have.
int64_t capacity_of(const Request& request, const model::ModelFacts& facts);

struct TokenLogprob {
  int32_t id = 0;
  float logprob = 0;
};

// Of one place in the text: natural logarithms of probabilities as the model gives them, before bias, penalties and
// temperature.
struct Logprobs {
  float token = 0;                      // of the token that is there
  std::vector<TokenLogprob> likeliest;  // falling, ties by id; as many as were asked for
};

struct Token {
  int choice = 0;
  int32_t id = 0;
  std::optional<Logprobs> logprobs{};  // where asked for
};

// How a request ended.
struct Outcome {
  std::vector<FinishReason> reasons;  // by choice
  ErrorCode error_code = ErrorCode::kInternal;
  std::string error{};                                   // empty: none. Of a failed or cancelled request
  int64_t num_prompt_tokens = 0, num_cached_tokens = 0;  // of the prompt; of those, not run because a prefix was known
  int64_t num_generated_tokens = 0;                      // over all choices
  int num_preemptions = 0;
  double waited_seconds = 0;       // until its prompt was begun
  double first_token_seconds = 0;  // until the first token was drawn, since submission; 0: none was
  double seconds = 0;              // until the end, since submission
};

// Where a request's tokens go. All calls come from the engine's thread and must return at once;
// docs/contracts/engine_loop.md.
class Sink {
 public:
  virtual ~Sink() = default;
  // Tokens that it takes now. Less than the request has open choices: the request pauses until Engine::wake() and room.
  virtual int64_t room() const { return std::numeric_limits<int64_t>::max(); }
  // Its prompt is begun; so many of its tokens need not be run, since a beginning was known. Before all other calls.
  virtual void begun(int64_t num_cached_tokens) { (void)num_cached_tokens; }
  // Of the prompt's tokens from `first_position` on. In order, each position once.
  virtual void prompt_logprobs(int64_t first_position, std::span<const Logprobs> logprobs) {
    (void)first_position, (void)logprobs;
  }
  // A token was drawn. False ends its choice (a stop string was found).
  virtual bool token(const Token& token) = 0;
  // No more tokens of a choice.
  virtual void choice_finished(int choice, FinishReason reason) { (void)choice, (void)reason; }
  // The request has ended: the last call.
  virtual void finished(const Outcome& outcome) = 0;
};

}  // namespace tessera::engine
