// SPDX-License-Identifier: Apache-2.0
#pragma once
// Conversation -> prompt text, byte for byte as DeepSeek's own encoder writes it.
//   messages -> tool results and consecutive users become one user turn -> results in the order of their calls
//     -> old reasoning dropped -> text
// Special tokens written in a message become those tokens when the prompt is tokenized, as in the reference.
// Source: encoding/encoding_dsv4.py of deepseek-ai/DeepSeek-V4-Flash; docs/formats/chat.md.
#include <span>
#include <string>

#include "text/chat/effort.h"
#include "text/chat/message.h"

namespace tessera::text {

enum class Thinking { kOff, kOn };

struct ChatOptions {
  Thinking thinking = Thinking::kOff;
  Effort effort = Effort::kDefault;  // only with thinking
  EffortTable effort_table = EffortTable::kPreview;
  // Reasoning of turns before the last user turn is left out, and so are developer messages there; only with thinking,
  // and not where any message has tools: then all stays.
  bool drops_old_reasoning = true;
};

struct Prompt {
  std::string text;
  bool starts_in_reasoning = false;  // the answer begins inside <think>: what AnswerParser wants to know
};

// Throws kInvalidArgument, naming the message and the field: text that is not UTF-8, a developer message without
// content, an effort that the table refuses. A conversation that ends in, say, a system message is rendered too.
Prompt render_chat(std::span<const Message> messages, const ChatOptions& options);

// Throws kInvalidArgument where the prompt would not lead to an answer: no messages, or the last one is neither a user,
// developer or tool message nor an open assistant message, and has no task.
void check_answerable(std::span<const Message> messages);

}  // namespace tessera::text
