// SPDX-License-Identifier: Apache-2.0
#pragma once
// A model that runs: folder, tokenizer, weights and the engine that serves its requests.
#include <cstdint>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <string>

#include "engine/engine.h"
#include "model/load_model.h"
#include "text/chat/effort.h"
#include "text/tokenizer/tokenizer.h"

namespace tessera::python {

struct ModelOptions {
  std::string device = "cpu", mode = "a16", cache = "fp8";
  int num_threads = 0;                                  // 0: one per processor
  int64_t max_model_len = 0;                            // tokens of prompt and answer; 0: the model's, at most 131072
  std::optional<int64_t> max_running, max_step_tokens;  // none: model::default_running, default_step_tokens
  bool allow_inexact = false;
};

// Thread-safe.
class LoadedModel {
 public:
  // Throws as model::load_model does; kInvalidArgument for options. `progress` may be null.
  LoadedModel(const std::string& directory, const ModelOptions& options, ProgressSink* progress);

  // The request's id. Throws kInvalidArgument for a request that could never run, kResourceExhausted where too much
  // waits, and after close().
  engine::RequestId submit(engine::Request request, std::shared_ptr<engine::Sink> sink);
  // Ends a request before the next step. Unknown and ended ones are ignored.
  void cancel(engine::RequestId id);
  // Ends every request as cancelled and gives the weights back. Nothing runs after it; the tokenizer stays.
  void close();
  bool is_closed() const;

  const std::string& directory() const { return directory_; }
  const model::ModelFacts& facts() const { return facts_; }
  int64_t max_model_len() const { return max_model_len_; }
  text::EffortTable effort_table() const { return effort_table_; }
  const text::Tokenizer* tokenizer_or_null() const { return tokenizer_ ? &*tokenizer_ : nullptr; }
  // Throws kNotFound where the folder has no tokenizer.json.
  const text::Tokenizer& tokenizer() const;
  // The same, and kUnsupported where it lacks the chat format's tokens.
  const text::Tokenizer& chat_tokenizer() const;

 private:
  std::string directory_;
  int64_t max_model_len_ = 0;
  std::optional<text::Tokenizer> tokenizer_;
  text::EffortTable effort_table_;
  model::ModelFacts facts_;
  mutable std::shared_mutex lock_;  // of what follows
  model::LoadedModel loaded_;
  std::unique_ptr<engine::CacheBudget> budget_;
  std::unique_ptr<engine::Engine> engine_;
};

}  // namespace tessera::python
