// SPDX-License-Identifier: Apache-2.0
#include "sampling_flags.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <random>

#include "base/strings.h"
#include "console.h"
#include "usage.h"

namespace tessera::app {

namespace {

constexpr size_t kMaxStops = 16, kMaxStopBytes = 256;

// "ID:BIAS" each.
std::vector<std::pair<int32_t, float>> parse_bias(const std::vector<std::string>& items) {
  std::vector<std::pair<int32_t, float>> out;
  for (const std::string& item : items) {
    const size_t colon = item.find(':');
    int32_t id = 0;
    float bias = 0;
    const char* last = item.data() + item.size();
    const bool is_split = colon != std::string::npos;
    const bool is_id = is_split && std::from_chars(item.data(), item.data() + colon, id).ptr == item.data() + colon;
    const bool is_bias =
        is_split && std::from_chars(item.data() + colon + 1, last, bias).ptr == last && colon + 1 < item.size();
    if (!is_id || !is_bias || colon == 0)
      fail_usage(fmt::format("--logit-bias: expected ID:NUMBER, found \"{}\"", printable(item, 40)));
    out.emplace_back(id, bias);
  }
  return out;
}

}  // namespace

void add_sampling_flags(CLI::App& command, SamplingFlags& flags) {
  command.add_option("--max-tokens", flags.max_tokens, "Most tokens to make; 0 runs the prompt alone")
      ->capture_default_str()
      ->group("Sampling");
  command
      .add_option("--temperature", flags.params.temperature, "0 takes the likeliest token, 1 samples as the model says")
      ->capture_default_str()
      ->group("Sampling");
  command.add_option("--top-p", flags.params.top_p, "Sample from the likeliest tokens that together reach this")
      ->capture_default_str()
      ->group("Sampling");
  command.add_option("--top-k", flags.params.top_k, "Sample from this many tokens; 0: all")
      ->capture_default_str()
      ->group("Sampling");
  command.add_option("--min-p", flags.params.min_p, "Leave out tokens below this share of the likeliest")
      ->capture_default_str()
      ->group("Sampling");
  command.add_option("--repetition-penalty", flags.params.repetition_penalty, "Divide logits of seen tokens by this")
      ->capture_default_str()
      ->group("Sampling");
  command.add_option("--frequency-penalty", flags.params.frequency_penalty, "Take this off per time a token was seen")
      ->capture_default_str()
      ->group("Sampling");
  command.add_option("--presence-penalty", flags.params.presence_penalty, "Take this off once for a seen token")
      ->capture_default_str()
      ->group("Sampling");
  command.add_option("--logit-bias", flags.logit_bias, "ID:NUMBER added to a token's logit; repeatable")
      ->allow_extra_args(false)
      ->group("Sampling");
  command.add_option("--seed", flags.seed, "Repeat an answer exactly [a new one each time, printed]")
      ->type_name("N")
      ->check(not_empty("a number"))
      ->group("Sampling");
  command.add_option("--stop", flags.stops, "End before this text; repeatable")
      ->allow_extra_args(false)
      ->group("Sampling");
}

void check_stops(const std::vector<std::string>& stops) {
  if (stops.size() > kMaxStops)
    fail_usage(fmt::format("--stop: expected at most {}, found {}", kMaxStops, stops.size()));
  for (const std::string& stop : stops) {
    if (stop.empty() || stop.size() > kMaxStopBytes)
      fail_usage(fmt::format("--stop: expected 1 to {} bytes, found {}", kMaxStopBytes, stop.size()));
    if (!is_valid_utf8(stop)) fail_usage("--stop: expected UTF-8 text, found bytes that are not");
  }
}

uint64_t choose_seed(const std::string& text) {
  if (text.empty()) return static_cast<uint64_t>(std::random_device{}()) << 32 | std::random_device{}();
  uint64_t seed = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
  if (error != std::errc() || stop != text.data() + text.size()) {
    fail_usage(fmt::format("--seed: expected a number from 0 to 2^64 - 1, found \"{}\"", printable(text, 40)));
  }
  return seed;
}

void note_idle_flags(const CLI::App& command, const SamplingFlags& flags) {
  if (flags.params.temperature > 0) return;
  std::vector<std::string> idle;
  for (const char* name : {"--top-p", "--top-k", "--min-p", "--seed"}) {
    if (command.get_option(name)->count() > 0) idle.emplace_back(name);
  }
  if (!idle.empty()) {
    print_note(fmt::format("note: {} changes nothing at --temperature 0, which takes the likeliest token",
                           fmt::join(idle, ", ")));
  }
}

engine::SamplingOptions sampling_options(const SamplingFlags& flags, uint64_t seed) {
  engine::SamplingOptions options{flags.params, parse_bias(flags.logit_bias)};
  options.params.seed = seed;
  return options;
}

}  // namespace tessera::app
