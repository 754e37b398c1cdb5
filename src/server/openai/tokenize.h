// SPDX-License-Identifier: Apache-2.0
#pragma once
// POST /tokenize and /detokenize, as vLLM has them.
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "server/api_error.h"
#include "server/request.h"

namespace tessera::server::openai {

struct TokenizeRequest {
  std::variant<std::string, ChatRequest> input;  // a text, or a conversation to render first
  bool adds_begin_token = true;                  // to a text; a conversation has it
  bool shows_tokens = false;                     // their texts come back beside the ids
};

const Schema& tokenize_schema();
const Schema& detokenize_schema();

Reply<TokenizeRequest> parse_tokenize(std::string_view body, const ServedModel& model);
// The ids, all of them below the vocabulary's size.
Reply<std::vector<int32_t>> parse_detokenize(std::string_view body, const ServedModel& model);

// {"count", "max_model_len", "tokens", "token_strs"}; `texts` are the tokens' bytes, or empty for none.
std::string render_tokenize(std::span<const int32_t> ids, std::span<const std::string> texts, int64_t max_model_len);
// {"prompt"}.
std::string render_detokenize(const std::string& text);

}  // namespace tessera::server::openai
