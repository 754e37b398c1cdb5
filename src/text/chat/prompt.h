// SPDX-License-Identifier: Apache-2.0
#pragma once
// The prompt of one user turn in DeepSeek-V4's chat format:
//   <BOS> [system text] <User> text <Assistant> then <think> or </think>
// Source: encoding/encoding_dsv4.py of deepseek-ai/DeepSeek-V4-Flash; docs/formats/tokenizer.md.
#include <string>
#include <string_view>

#include "text/tokenizer/tokenizer.h"

namespace tessera::text {

inline constexpr std::string_view kBosToken = "<\uFF5Cbegin\u2581of\u2581sentence\uFF5C>";
inline constexpr std::string_view kEosToken = "<\uFF5Cend\u2581of\u2581sentence\uFF5C>";
inline constexpr std::string_view kUserToken = "<\uFF5CUser\uFF5C>";
inline constexpr std::string_view kAssistantToken = "<\uFF5CAssistant\uFF5C>";
inline constexpr std::string_view kThinkToken = "<think>";
inline constexpr std::string_view kEndThinkToken = "</think>";

enum class Thinking { kOff, kOn };

struct UserTurn {
  std::string system;  // empty: none
  std::string user;
  Thinking thinking = Thinking::kOff;
};

// The prompt as text. Special tokens written in the user's text become those tokens, as in the reference.
std::string render_user_turn(const UserTurn& turn);

// Throws kUnsupported where the tokenizer lacks one of the format's tokens.
void check_chat_tokens(const Tokenizer& tokenizer, const std::string& where);

}  // namespace tessera::text
