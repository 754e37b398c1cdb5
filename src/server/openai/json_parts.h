// SPDX-License-Identifier: Apache-2.0
#pragma once
// Pieces of JSON that several of OpenAI's answers share. All text goes through here, so that none of it is invalid
// UTF-8, which JSON cannot hold.
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "server/answer.h"

namespace tessera::server::openai {

// A log probability as JSON: null for NaN (the first token of a prompt has none), and -9999 for -infinity.
nlohmann::ordered_json logprob_json(double logprob);
// [{"token", "logprob", "bytes", "top_logprobs"}] of chat completions and responses.
nlohmann::ordered_json token_logprobs_json(std::span<const TokenLogprob> tokens);
// {"content": [...], "reasoning_content": [...]}; the latter as DeepSeek's service has it, where there is any.
nlohmann::ordered_json chat_logprobs_json(std::span<const TokenLogprob> reasoning,
                                          std::span<const TokenLogprob> content);
// usage of chat completions and completions. Beside OpenAI's fields the two that DeepSeek's clients read.
nlohmann::ordered_json usage_json(const Usage& usage);
// The JSON text of one chunk or answer.
std::string dumped(const nlohmann::ordered_json& json);

}  // namespace tessera::server::openai
