// SPDX-License-Identifier: Apache-2.0
#include "server/openai/json_parts.h"

#include <algorithm>
#include <cmath>

namespace tessera::server::openai {

namespace {

// JSON has no infinity; other servers write this number, and clients compare with it.
constexpr double kLowestLogprob = -9999.0;

JsonObject token_json(const TokenChoice& token) {
  JsonArray bytes;
  for (const char byte : token.bytes) bytes.add(static_cast<unsigned char>(byte));
  return {{"token", token.bytes}, {"logprob", logprob_json(token.logprob)}, {"bytes", bytes}};
}

}  // namespace

JsonText logprob_json(double logprob) {
  if (std::isnan(logprob)) return nullptr;
  return std::max(logprob, kLowestLogprob);
}

JsonArray token_logprobs_json(std::span<const TokenLogprob> tokens) {
  JsonArray out;
  for (const TokenLogprob& token : tokens) {
    JsonArray top;
    for (const TokenChoice& other : token.top) top.add(token_json(other));
    out.add(token_json(token.token).add("top_logprobs", top));
  }
  return out;
}

JsonObject chat_logprobs_json(std::span<const TokenLogprob> reasoning, std::span<const TokenLogprob> content) {
  JsonObject out{{"content", token_logprobs_json(content)}};
  if (!reasoning.empty()) out.add("reasoning_content", token_logprobs_json(reasoning));
  return out.add("refusal", nullptr);
}

JsonObject usage_json(const Usage& usage) {
  return {{"prompt_tokens", usage.num_prompt_tokens},
          {"completion_tokens", usage.num_completion_tokens},
          {"total_tokens", usage.num_prompt_tokens + usage.num_completion_tokens},
          {"prompt_tokens_details", JsonObject{{"cached_tokens", usage.num_cached_tokens}}},
          {"completion_tokens_details", JsonObject{{"reasoning_tokens", usage.num_reasoning_tokens}}},
          {"prompt_cache_hit_tokens", usage.num_cached_tokens},
          {"prompt_cache_miss_tokens", usage.num_prompt_tokens - usage.num_cached_tokens}};
}

}  // namespace tessera::server::openai
