// SPDX-License-Identifier: Apache-2.0
#pragma once
// The prompt of one user turn, and whether a tokenizer knows the chat format at all.
#include <string>

#include "text/chat/encode.h"
#include "text/chat/markers.h"
#include "text/tokenizer/tokenizer.h"

namespace tessera::text {

struct UserTurn {
  std::string system;  // empty: none
  std::string user;
  Thinking thinking = Thinking::kOff;
};

// The prompt as text. Special tokens written in the user's text become those tokens, as in the reference. Throws
// kInvalidArgument for text that is not UTF-8.
std::string render_user_turn(const UserTurn& turn);

// Throws kUnsupported where the tokenizer lacks one of the format's tokens.
void check_chat_tokens(const Tokenizer& tokenizer, const std::string& where);

}  // namespace tessera::text
