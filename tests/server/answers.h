// SPDX-License-Identifier: Apache-2.0
#pragma once
// Answers as a model writes them, made at random, and driven through an assembler token by token.
#include <string>
#include <vector>

#include "served.h"
#include "text/chat/markers.h"
#include "text/chat/python_json.h"

namespace tessera::server {

struct Sampled {
  std::string text;
  bool starts_in_reasoning = false;
  Ending ending = Ending::kEndToken;
  std::vector<std::string> stops;
};

inline std::string random_text(std::mt19937& random) {
  static const char* const kPieces[] = {"a",  "b ",      "\n",     "\n\n",       "<",    "</",  "\"",
                                        "\\", "\u00e9",  "\u4e16", "\U0001F600", "stop", "sto", "{",
                                        "}",  "</think", ".\n\n",  "data: ",     "\x01"};
  std::string text;
  for (uint32_t i = random() % 8; i > 0; --i) text += kPieces[random() % std::size(kPieces)];
  return text;
}

// A call as the chat format has it; values are strings, numbers, objects.
inline std::string random_call(std::mt19937& random) {
  std::string out = std::string(text::kInvokeTag) + " name=\"f" + std::to_string(random() % 3) + "\">\n";
  const uint32_t num_parameters = random() % 4;
  for (uint32_t i = 0; i < num_parameters; ++i) {
    const bool is_string = random() % 2 == 0;
    static const char* const kValues[] = {"1",    "1.0",   "{\"b\":1,  \"a\": [true]}",
                                          "null", "\"x\"", "12345678901234567890"};
    out += std::string(text::kParameterTag) + " name=\"p" + std::to_string(i) + "\" string=\"" +
           (is_string ? "true" : "false") + "\">" + (is_string ? random_text(random) : kValues[random() % 6]) +
           std::string(text::kEndParameterTag) + ">\n";
  }
  if (num_parameters == 0) out += "\n";
  return out + std::string(text::kEndInvokeTag) + ">\n";
}

inline Sampled random_answer(std::mt19937& random) {
  Sampled out;
  out.starts_in_reasoning = random() % 2 == 0;
  if (out.starts_in_reasoning) out.text = random_text(random) + std::string(text::kEndThinkToken);
  out.text += random_text(random);
  if (random() % 2 == 0) {
    out.text += "\n\n" + std::string(text::kToolCallsTag) + ">\n";
    for (uint32_t i = 1 + random() % 3; i > 0; --i) out.text += random_call(random);
    out.text += text::kEndToolCallsTag;
  }
  if (random() % 4 == 0) {
    out.ending = Ending::kLength;
    out.text.resize(random() % (out.text.size() + 1));
  } else if (random() % 2 == 0) {
    out.text += text::kEosToken;
  }
  if (random() % 4 == 0) out.stops = {"stop", "b \n"};
  return out;
}

inline AnswerOptions options_of(const Sampled& sampled, bool keeps_logprobs = false) {
  AnswerOptions options;
  options.starts_in_reasoning = sampled.starts_in_reasoning;
  options.stops = sampled.stops;
  options.keeps_logprobs = keeps_logprobs;
  return options;
}

// A token with itself and perhaps another one as the likeliest.
inline TokenLogprob token_logprob(const std::string& bytes, double logprob, const std::string& other = "",
                                  double other_logprob = 0) {
  TokenLogprob out;
  out.token.bytes = bytes;
  out.token.logprob = logprob;
  out.top.push_back(out.token);
  if (other.empty()) return out;
  out.top.emplace_back();
  out.top.back().bytes = other;
  out.top.back().logprob = other_logprob;
  return out;
}

// Pushes parts of the text as tokens. Calls on_delta(delta) for each, and for what finish gives.
template <class OnDelta>
FinishedAnswer drive(const Sampled& sampled, const std::vector<std::string>& parts, AnswerOptions options,
                     const OnDelta& on_delta) {
  CountedIds ids;
  AnswerAssembler assembler(std::move(options), ids);
  for (const std::string& part : parts) {
    const TokenLogprob logprob = token_logprob(part, -0.5, "x", -2);
    on_delta(assembler.push(part, &logprob));
    if (assembler.has_stopped()) break;
  }
  const AnswerDelta last = assembler.finish(assembler.has_stopped() ? Ending::kStopped : sampled.ending);
  on_delta(last);
  return assembler.answer();
}

inline FinishedAnswer finished(const Sampled& sampled, AnswerOptions options) {
  return drive(sampled, {sampled.text}, std::move(options), [](const AnswerDelta&) {});
}

}  // namespace tessera::server
