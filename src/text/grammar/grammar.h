// SPDX-License-Identifier: Apache-2.0
#pragma once
// Definitions -> grammars over a tokenizer's tokens, and what a grammar says of an answer token by token. The one place
// that knows XGrammar (docs/decisions/0027-grammars.md).
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "text/grammar/definition.h"
#include "text/grammar/spelled_marker.h"
#include "text/grammar/trial.h"
#include "text/tokenizer/tokenizer.h"

namespace tessera::text {

// Of one answer. Not thread-safe.
class GrammarMatcher {
 public:
  virtual ~GrammarMatcher() = default;
  // `mask` [(vocab + 31) / 32]: bit id % 32 of word id / 32 becomes 1 for tokens that may come next, an end token where
  // the answer may end. False: none may. Throws kInvalidArgument where the last token and this mask took more of the
  // processor than a mask may: afterwards, since nothing interrupts it.
  virtual bool fill(std::span<uint32_t> mask) = 0;
  // A token of the answer. False, and nothing changed, where it may not come next.
  virtual bool accept(int32_t id) = 0;
  // An end token was accepted.
  virtual bool has_ended() const = 0;
};

// Compiled; shared by all answers to it. Thread-safe.
class Grammar {
 public:
  virtual ~Grammar() = default;
  virtual std::unique_ptr<GrammarMatcher> begin() const = 0;
  virtual size_t size_bytes() const = 0;
};

// Thread-safe.
class GrammarCompiler {
 public:
  struct Limits {
    size_t cache_bytes = size_t{256} << 20;    // of compiled grammars, and refusals, that are kept
    size_t grammar_bytes = size_t{128} << 20;  // of one
    TrialLimits trial{};                       // of compiling one
    double mask_seconds = 0.5;                 // of processor time, of one mask
  };
  // `vocab_size`: the model's, at least the tokenizer's. `end_ids` end an answer. No special token but those and the
  // markup of calls is ever part of one. Forks a process for trials: make it before this one is large.
  GrammarCompiler(const Tokenizer& tokenizer, int32_t vocab_size, std::span<const int32_t> end_ids,
                  const Limits& limits);
  GrammarCompiler(const Tokenizer& tokenizer, int32_t vocab_size, std::span<const int32_t> end_ids)
      : GrammarCompiler(tokenizer, vocab_size, end_ids, Limits{}) {}
  ~GrammarCompiler();

  // Throws kInvalidArgument, in one line, where a definition is malformed, means what no answer can be, has what a
  // grammar cannot hold an answer to, or is above a limit. Costs milliseconds to seconds; a second time nothing, while
  // it is kept. Throws kResourceExhausted where there is no process to try it in, or
  // it has too little of a busy machine.
  std::shared_ptr<const Grammar> compile(const GrammarDefinition& definition);
  // Whether compile() takes no time: it was compiled or refused for what it is, and that is kept.
  bool knows(const GrammarDefinition& definition) const;
  // Of the chat format, which an answer that is held to a grammar must not spell: null where the tokenizer has none.
  const std::shared_ptr<const SpelledMarker>& end_of_reasoning() const { return end_of_reasoning_; }
  const std::shared_ptr<const SpelledMarker>& markup_of_calls() const { return markup_of_calls_; }

  struct Stats {
    size_t num_kept = 0, bytes = 0;
    uint64_t num_hits = 0, num_misses = 0;
  };
  Stats stats() const;

 private:
  class Body;
  struct Kept {
    std::string key;
    std::shared_ptr<const Grammar> grammar;  // null: it is refused
    std::string refusal;
    size_t cost_bytes() const;
  };

  std::shared_ptr<const Grammar> make(const GrammarDefinition& definition);
  void keep(Kept kept);

  const Limits limits_;
  const std::unique_ptr<Body> body_;
  const std::shared_ptr<const SpelledMarker> end_of_reasoning_, markup_of_calls_;
  Trial trial_;
  mutable std::mutex lock_;
  std::list<Kept> kept_;  // what was used last comes first
  std::unordered_map<std::string, std::list<Kept>::iterator> by_key_;
  Stats stats_;
};

}  // namespace tessera::text
