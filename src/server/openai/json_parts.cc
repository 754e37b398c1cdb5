// SPDX-License-Identifier: Apache-2.0
#include "server/openai/json_parts.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/strings.h"

namespace tessera::server::openai {

namespace {

using OrderedJson = nlohmann::ordered_json;

// JSON has no infinity; other servers write this number, and clients compare with it.
constexpr double kLowestLogprob = -9999.0;

OrderedJson token_json(const TokenChoice& token) {
  OrderedJson bytes = OrderedJson::array();
  for (const char byte : token.bytes) bytes.push_back(static_cast<unsigned char>(byte));
  return {{"token", replace_invalid_utf8(token.bytes)},
          {"logprob", logprob_json(token.logprob)},
          {"bytes", std::move(bytes)}};
}

}  // namespace

OrderedJson logprob_json(double logprob) {
  if (std::isnan(logprob)) return nullptr;
  return std::max(logprob, kLowestLogprob);
}

OrderedJson token_logprobs_json(std::span<const TokenLogprob> tokens) {
  OrderedJson out = OrderedJson::array();
  for (const TokenLogprob& token : tokens) {
    OrderedJson item = token_json(token.token);
    OrderedJson top = OrderedJson::array();
    for (const TokenChoice& other : token.top) top.push_back(token_json(other));
    item["top_logprobs"] = std::move(top);
    out.push_back(std::move(item));
  }
  return out;
}

OrderedJson chat_logprobs_json(std::span<const TokenLogprob> reasoning, std::span<const TokenLogprob> content) {
  OrderedJson out = {{"content", token_logprobs_json(content)}};
  if (!reasoning.empty()) out["reasoning_content"] = token_logprobs_json(reasoning);
  out["refusal"] = nullptr;
  return out;
}

OrderedJson usage_json(const Usage& usage) {
  return {{"prompt_tokens", usage.num_prompt_tokens},
          {"completion_tokens", usage.num_completion_tokens},
          {"total_tokens", usage.num_prompt_tokens + usage.num_completion_tokens},
          {"prompt_tokens_details", {{"cached_tokens", usage.num_cached_tokens}}},
          {"completion_tokens_details", {{"reasoning_tokens", usage.num_reasoning_tokens}}},
          {"prompt_cache_hit_tokens", usage.num_cached_tokens},
          {"prompt_cache_miss_tokens", usage.num_prompt_tokens - usage.num_cached_tokens}};
}

std::string dumped(const OrderedJson& json) {
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

}  // namespace tessera::server::openai
