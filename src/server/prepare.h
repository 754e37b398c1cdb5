// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bodies -> what the engine runs: parsed, rendered, tokenised, held against the context's length. Costs time in
// proportion to the text, so it belongs on a worker's thread.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/request.h"
#include "server/answer_writer.h"
#include "server/grammar_constraint.h"
#include "server/replay_store.h"
#include "server/request.h"
#include "server/routes.h"
#include "text/tokenizer/tokenizer.h"

namespace tessera::server {

// What is served. `model` and `tokenizer` are not changed while requests run.
struct Serving {
  ServedModel model;
  const text::Tokenizer* tokenizer = nullptr;
  text::GrammarCompiler* grammars = nullptr;  // null: model.has_grammars is false
  int32_t bos_id = 0;
  std::vector<int32_t> eos_ids;
  std::string fingerprint, version;
  int64_t created = 0;  // seconds since 1970
};

// Who asks.
struct Caller {
  std::string owner;    // what separates clients' remembered tool calls; empty where there are no keys
  uint64_t client = 0;  // for the engine's fairness
};

// One request of a client, ready to run: one of the engine's per prompt.
struct PreparedAnswer {
  std::vector<engine::Request> requests;
  int num_choices = 1;  // of each prompt
  AnswerOptions options;
  std::unique_ptr<AnswerWriter> writer;
  bool is_stream = false;
  bool echoes = false;                // the prompt comes before its answer
  std::vector<char> has_added_begin;  // by prompt: its first token is not the client's
  bool has_logprobs = false;
  std::string owner;                 // under which calls are remembered
  std::vector<std::string> ignored;  // fields of the body without a meaning here
};

class Preparer {
 public:
  // All must outlive it. Threads may call it at once.
  Preparer(const Serving& serving, ReplayStore& replay, IdSource& ids);

  // A generating route's body. `check` is asked, with an estimate from below of the prompt's tokens, before anything is
  // tokenised; what it throws is the answer (RequestError).
  class RoomCheck {
   public:
    virtual ~RoomCheck() = default;
    virtual void check(int64_t num_tokens) const = 0;
  };
  // Throws RequestError and what parsing throws.
  // GrammarUnknown: ask again where time may be taken.
  PreparedAnswer prepare(RouteKind route, std::string_view body, const Caller& caller, const RoomCheck& check,
                         Compiling compiling) const;
  // The body that answers count_tokens, tokenize or detokenize. Throws as prepare does.
  std::string answer(RouteKind route, std::string_view body, const Caller& caller) const;

 private:
  PreparedAnswer from_chat(ChatRequest& request, const Caller& caller, const RoomCheck& check,
                           Compiling compiling) const;
  PreparedAnswer from_completion(const CompletionRequest& request, const Caller& caller, const RoomCheck& check) const;
  std::string render(ChatRequest& request, const Caller& caller, bool& starts_in_reasoning) const;
  // `default_tokens`: of an answer whose request does not say how many.
  engine::Request engine_request(const GenerationOptions& options, std::vector<int32_t> prompt, const Caller& caller,
                                 int64_t default_tokens) const;
  openai::AnswerHead head(std::string_view id_prefix, const std::string& model) const;

  const Serving& serving_;
  ReplayStore& replay_;
  IdSource& ids_;
  std::shared_ptr<const std::vector<uint32_t>> without_markup_;  // all tokens but that of calls' markup
};

}  // namespace tessera::server
