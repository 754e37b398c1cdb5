// SPDX-License-Identifier: Apache-2.0
#include "bench/serve/workload.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/strings.h"

namespace tessera::bench {

namespace {

constexpr int64_t kMaxTokens = 1 << 20;
constexpr int64_t kFirstTokenId = 3;  // below it are the tokens that begin, end and pad
constexpr double kCutAt = 16;
constexpr uint64_t kMaxFileBytes = uint64_t{256} << 20;
// Streams of random numbers: one for what all prompts share, then one a request.
constexpr uint64_t kSharedStream = 0;

template <class T>
std::optional<T> number(std::string_view text) {
  T value{};
  const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (fault != std::errc() || end != text.data() + text.size() || text.empty()) return std::nullopt;
  return value;
}

void add_ids(Rng& rng, int64_t count, int64_t max_token_id, std::string& out) {
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t id = kFirstTokenId + rng.below(static_cast<uint64_t>(max_token_id - kFirstTokenId + 1));
    out += fmt::format("{}{}", out.size() > 1 ? "," : "", id);
  }
}

}  // namespace

LengthDistribution LengthDistribution::parse(std::string_view text, std::string_view flag) {
  LengthDistribution out;
  const size_t colon = text.find(':');
  const std::string_view kind = colon == std::string_view::npos ? "" : text.substr(0, colon);
  const std::string_view rest = colon == std::string_view::npos ? text : text.substr(colon + 1);
  const char separator = kind == "uniform" ? '-' : ',';
  const std::vector<std::string_view> parts = split(rest, separator);
  const std::optional<int64_t> first = number<int64_t>(parts[0]);
  bool is_right = first && *first >= 1 && *first <= kMaxTokens && parts.size() == (kind.empty() ? 1 : 2);
  if (is_right) out.low_ = out.high_ = *first;
  if (is_right && kind == "uniform") {
    out.kind_ = Kind::kUniform;
    out.high_ = number<int64_t>(parts[1]).value_or(0);
    is_right = out.high_ >= out.low_ && out.high_ <= kMaxTokens;
  } else if (is_right && kind == "lognormal") {
    out.kind_ = Kind::kLogNormal;
    out.sigma_ = number<double>(parts[1]).value_or(-1);
    is_right = out.sigma_ >= 0 && out.sigma_ <= 4;
  } else if (!kind.empty()) {
    is_right = false;
  }
  if (is_right) return out;
  fail(ErrorCode::kInvalidArgument,
       fmt::format("{}: expected a number of tokens, uniform:FROM-TO or lognormal:MEDIAN,SIGMA with 1 to {} tokens and "
                   "a sigma of 0 to 4, found \"{}\"",
                   flag, kMaxTokens, printable(text, 60)));
}

int64_t LengthDistribution::draw(Rng& rng) const {
  switch (kind_) {
    case Kind::kUniform:
      return low_ + static_cast<int64_t>(rng.below(static_cast<uint64_t>(high_ - low_ + 1)));
    case Kind::kLogNormal: {
      const double factor = std::min(std::exp(sigma_ * static_cast<double>(rng.normal())), kCutAt);
      return std::max<int64_t>(1, std::llround(static_cast<double>(low_) * factor));
    }
    case Kind::kFixed:
      break;
  }
  return low_;
}

Workload::Workload(WorkloadOptions options) : options_(std::move(options)) {
  if (!options_.prompts_file.empty()) read_prompts();
}

void Workload::read_prompts() {
  const std::string text = read_file(options_.prompts_file, kMaxFileBytes);
  int64_t line_number = 0;
  for (const std::string_view line : split(text, '\n')) {
    ++line_number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string where = fmt::format("{}, line {}", printable(options_.prompts_file), line_number);
    const Json parsed = Json::parse_exact(line, where);
    const JsonCursor cursor(parsed, where);
    const bool has_messages = cursor.find("messages").has_value();
    if (has_messages == cursor.find("prompt").has_value()) cursor.fail_expected("\"prompt\" or \"messages\"");
    Asked asked;
    const char* name = has_messages ? "messages" : "prompt";
    asked.path = has_messages ? "/v1/chat/completions" : "/v1/completions";
    asked.member = fmt::format("\"{}\":{}", name, nlohmann::ordered_json::parse(line)[name].dump());
    if (const auto most = cursor.find("max_tokens")) asked.max_tokens = most->integer(1, kMaxTokens);
    asked_.push_back(std::move(asked));
  }
  if (asked_.empty()) {
    fail_data(options_.prompts_file, "prompts", "a JSON object a line", "none");
  }
}

BenchRequest Workload::request(int64_t index) const {
  Rng rng(options_.seed, kSharedStream + 1 + static_cast<uint64_t>(index));
  const int64_t num_prompt = options_.prompt_tokens.draw(rng);
  int64_t num_output = options_.output_tokens.draw(rng);
  Asked asked;
  if (!asked_.empty()) {
    asked = asked_[static_cast<size_t>(index) % asked_.size()];
    if (asked.max_tokens > 0) num_output = asked.max_tokens;
  } else {
    const auto num_shared = std::llround(options_.shared_prefix * static_cast<double>(num_prompt));
    Rng shared(options_.seed, kSharedStream);
    std::string ids = "[";
    add_ids(shared, num_shared, options_.max_token_id, ids);
    add_ids(rng, num_prompt - num_shared, options_.max_token_id, ids);
    asked = {"/v1/completions", "\"ignore_eos\":true,\"prompt\":" + ids + "]", 0};
  }
  return {
      asked.path,
      fmt::format(R"({{"model":{},"stream":true,"stream_options":{{"include_usage":true}},"temperature":1,"seed":{},)"
                  R"("max_tokens":{},{}}})",
                  nlohmann::json(options_.model).dump(), index, num_output, asked.member)};
}

}  // namespace tessera::bench
