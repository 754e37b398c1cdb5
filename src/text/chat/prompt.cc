// SPDX-License-Identifier: Apache-2.0
#include "text/chat/prompt.h"

#include <fmt/format.h>

#include "base/error.h"

namespace tessera::text {

std::string render_user_turn(const UserTurn& turn) {
  std::string prompt(kBosToken);
  prompt += turn.system;
  prompt += kUserToken;
  prompt += turn.user;
  prompt += kAssistantToken;
  prompt += turn.thinking == Thinking::kOn ? kThinkToken : kEndThinkToken;
  return prompt;
}

void check_chat_tokens(const Tokenizer& tokenizer, const std::string& where) {
  for (const std::string_view token : {kBosToken, kUserToken, kAssistantToken, kThinkToken, kEndThinkToken}) {
    if (!tokenizer.added_token(token)) {
      fail(ErrorCode::kUnsupported,
           fmt::format("{}: field added_tokens: expected {} for the chat format, found none; use --raw", where, token));
    }
  }
}

}  // namespace tessera::text
