// SPDX-License-Identifier: Apache-2.0
#pragma once
// Pieces of JSON that several of OpenAI's answers share.
#include <span>

#include "server/answer.h"
#include "server/json_text.h"

namespace tessera::server::openai {

// A log probability as JSON: null for NaN (the first token of a prompt has none), and -9999 for -infinity.
JsonText logprob_json(double logprob);
// [{"token", "logprob", "bytes", "top_logprobs"}] of chat completions and responses.
JsonArray token_logprobs_json(std::span<const TokenLogprob> tokens);
// {"content": [...], "reasoning_content": [...]}; the latter as DeepSeek's service has it, where there is any.
JsonObject chat_logprobs_json(std::span<const TokenLogprob> reasoning, std::span<const TokenLogprob> content);
// usage of chat completions and completions. Beside OpenAI's fields the two that DeepSeek's clients read.
JsonObject usage_json(const Usage& usage);

}  // namespace tessera::server::openai
