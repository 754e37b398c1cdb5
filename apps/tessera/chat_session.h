// SPDX-License-Identifier: Apache-2.0
#pragma once
// A conversation with a model: its messages, how answers are made, and the sequence state that both sides share.
#include <string>
#include <vector>

#include "chat_screen.h"
#include "engine/conversation.h"
#include "model_flags.h"
#include "sampling_flags.h"
#include "text/chat/encode.h"

namespace tessera::app {

class ChatSession {
 public:
  struct Settings {
    text::ChatOptions chat;
    SamplingFlags sampling;
    uint64_t seed = 0;  // of the first answer; each further answer takes the next one
  };

  // `folder` has a tokenizer with the chat format's tokens; both outlive the session. `context` is the most tokens.
  ChatSession(const ModelFolder& folder, model::Runner& runner, Settings settings, int64_t context);

  Settings& settings() { return settings_; }

  // Asks, and streams the answer to `screen`. A question that got no answer at all is taken back. Throws what the
  // engine throws; the question is taken back then, too.
  engine::GenerateResult ask(const std::string& question, ChatScreen& screen);
  // Answers the last question again. Throws kInvalidArgument where there is none.
  engine::GenerateResult retry(ChatScreen& screen);
  // Takes back the last question and its answer; false where there is none.
  bool undo();
  // Forgets all but the system text.
  void clear();

  std::string system() const;
  void set_system(const std::string& text);  // empty: none

  // The messages as {"messages": [...]}, the form of OpenAI's chat completions. Throws where the file can't be written.
  void save(const std::string& path) const;
  // Replaces the messages. Throws kDataLoss, kNotFound; kUnsupported for tools and response formats.
  void load(const std::string& path);

  size_t num_messages() const { return messages_.size(); }
  const engine::Conversation& conversation() const { return conversation_; }

 private:
  engine::GenerateResult answer(ChatScreen& screen);

  const ModelFolder& folder_;
  model::Runner& runner_;
  Settings settings_;
  engine::Conversation conversation_;
  std::vector<text::Message> messages_;
  uint64_t num_answers_ = 0;
};

}  // namespace tessera::app
