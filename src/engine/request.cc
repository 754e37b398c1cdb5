// SPDX-License-Identifier: Apache-2.0
#include "engine/request.h"

#include <fmt/format.h>

#include <algorithm>

namespace tessera::engine {

namespace {

constexpr size_t kMaxStopIds = 256;

std::optional<std::string> find_bad_id(const char* field, std::span<const int32_t> ids, int32_t vocab_size) {
  const auto bad = std::find_if(ids.begin(), ids.end(), [&](int32_t id) { return id < 0 || id >= vocab_size; });
  if (bad == ids.end()) return std::nullopt;
  return fmt::format("{}: expected token ids from 0 to {}, found {}", field, vocab_size - 1, *bad);
}

std::optional<std::string> find_bad_count(const char* field, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return std::nullopt;
  return fmt::format("{}: expected {} to {}, found {}", field, least, most, value);
}

}  // namespace

std::optional<std::string> find_fault(const Request& request, const model::ModelFacts& facts) {
  const int64_t length = static_cast<int64_t>(request.prompt.size());
  if (length == 0) return "prompt: expected at least one token, found none";
  if (length > facts.max_positions) {
    return fmt::format("prompt: expected at most {} tokens, this model's longest sequence, found {}",
                       facts.max_positions, length);
  }
  if (request.max_tokens < 0) return fmt::format("max-tokens: expected 0 or more, found {}", request.max_tokens);
  if (request.stop_ids.size() > kMaxStopIds) {
    return fmt::format("stop-ids: expected at most {}, found {}", kMaxStopIds, request.stop_ids.size());
  }
  if (request.allowed != nullptr &&
      static_cast<int64_t>(request.allowed->size()) != ops::mask_words(facts.vocab_size)) {
    return fmt::format("allowed: expected a bit for each of {} tokens, found {} words", facts.vocab_size,
                       request.allowed->size());
  }
  for (const std::optional<std::string>& fault : {
           find_bad_id("prompt", request.prompt, facts.vocab_size),
           find_bad_id("stop-ids", request.stop_ids, facts.vocab_size),
           find_bad_count("choices", request.num_choices, 1, kMaxChoices),
           find_bad_count("logprobs", request.logprobs.value_or(0), 0, kMaxTopLogprobs),
           find_bad_count("prompt-logprobs", request.prompt_logprobs.value_or(0), 0, kMaxTopLogprobs),
       }) {
    if (fault) return fault;
  }
  return find_fault(request.sampling, facts.vocab_size);
}

int64_t capacity_of(const Request& request, const model::ModelFacts& facts) {
  const int64_t length = static_cast<int64_t>(request.prompt.size());
  return length + std::min(request.max_tokens, facts.max_positions - length);
}

}  // namespace tessera::engine
