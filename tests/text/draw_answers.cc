// SPDX-License-Identifier: Apache-2.0
// Reads JSON Schemas, one per line, and writes what comes of each in a line of JSON: {"refused": why}, or {"answers":
// [texts]} drawn at random from what its grammar allows: what tools/compare_schemas.py compares. With "calls" the
// schemas are of a strict tool's parameters, and the texts the arguments of calls; with "patterns" lines are JSON
// strings, regular expressions of whole answers.
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/json.h"
#include "base/rng.h"
#include "base/strings.h"
#include "text/chat/answer_parser.h"
#include "text/chat/markers.h"
#include "text/chat/python_json.h"
#include "text/grammar/grammar.h"
#include "text/grammar/pattern.h"
#include "text/grammar/schema_fault.h"

namespace {

using namespace tessera;

constexpr int kAnswers = 12, kMostTokens = 400, kTriesOfOne = 4;

// Half of the tokens drawn are of one character, so that strings end, and structure comes often. Nothing where the
// answer did not end.
std::optional<std::string> draw(const text::Grammar& grammar, const text::Tokenizer& tokenizer, Rng& rng) {
  const auto matcher = grammar.begin();
  std::vector<uint32_t> mask(static_cast<size_t>((tokenizer.vocab_size() + 31) / 32));
  std::string out;
  for (int i = 0; i < kMostTokens; ++i) {
    if (!matcher->fill(mask)) return std::nullopt;
    std::vector<int32_t> all, marks;
    for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
      if ((mask[static_cast<size_t>(id / 32)] >> (id % 32) & 1) == 0) continue;
      all.push_back(id);
      const std::string& bytes = tokenizer.token_bytes(id);
      if (tokenizer.is_special(id) || bytes == "\"" || bytes == "}" || bytes == "]" || bytes == ",")
        marks.push_back(id);
    }
    const auto& ids = !marks.empty() && rng.below(2) == 0 ? marks : all;
    const int32_t id = ids[rng.below(ids.size())];
    if (!matcher->accept(id)) return std::nullopt;
    if (matcher->has_ended()) return out;
    out += tokenizer.token_bytes(id);
  }
  return std::nullopt;
}

std::string refused(const std::string& why) {
  return fmt::format("{{\"refused\": {}}}", text::json_quoted(replace_invalid_utf8(why)));
}

enum class Kind { kSchemas, kCalls, kPatterns };

text::GrammarDefinition definition_of(const std::string& line, Kind kind) {
  using Content = text::GrammarDefinition::Content;
  text::GrammarDefinition definition;
  if (kind == Kind::kCalls) {
    definition.tools = {{"f", line, true}};
    definition.allows_parallel = false;
  } else {
    definition.content = kind == Kind::kSchemas ? Content::kJsonSchema : Content::kRegex;
    definition.text = kind == Kind::kSchemas ? line : Json::parse(line, "stdin").string();
  }
  return definition;
}

std::optional<std::string> fault_of(const std::string& text, Kind kind) {
  if (kind == Kind::kPatterns) return text::find_pattern_fault(text, text::PatternUse::kAnswer);
  return text::find_schema_fault(text, kind == Kind::kCalls ? text::SchemaUse::kStrictTool : text::SchemaUse::kAnswer);
}

// As a client gets them.
std::string arguments_of(const std::string& answer) {
  text::AnswerParser parser(false);
  parser.push(answer);
  parser.finish(text::Ending::kEndToken);
  return parser.answer().calls.empty() ? "no call: " + answer : parser.answer().calls[0].arguments;
}

std::string outcome(text::GrammarCompiler& compiler, const text::Tokenizer& tokenizer, const std::string& line,
                    Kind kind, Rng& rng) {
  try {
    const text::GrammarDefinition definition = definition_of(line, kind);
    if (const auto fault = fault_of(kind == Kind::kCalls ? line : definition.text, kind)) return refused(*fault);
    const auto grammar = compiler.compile(definition);
    std::string answers;
    for (int i = 0; i < kAnswers; ++i) {
      std::optional<std::string> text;
      for (int j = 0; j < kTriesOfOne && !text; ++j) text = draw(*grammar, tokenizer, rng);
      if (!text || replace_invalid_utf8(*text) != *text) continue;  // bytes that a token begins and none goes on with
      answers += (answers.empty() ? "" : ", ") + text::json_quoted(kind == Kind::kCalls ? arguments_of(*text) : *text);
    }
    return fmt::format("{{\"answers\": [{}]}}", answers);
  } catch (const Error& error) {
    return refused(error.what());
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view what = argc == 4 ? argv[3] : "schemas";
  const Kind kind = what == "calls" ? Kind::kCalls : what == "patterns" ? Kind::kPatterns : Kind::kSchemas;
  if (argc < 3 || argc > 4) {
    std::fprintf(stderr, "usage: draw_answers TOKENIZER_JSON SEED [schemas|calls|patterns] < lines\n");
    return 2;
  }
  const text::Tokenizer tokenizer = text::Tokenizer::load(argv[1]);
  const int32_t ends[] = {tokenizer.added_token(text::kEosToken).value()};
  text::GrammarCompiler compiler(tokenizer, tokenizer.vocab_size(), ends);
  Rng rng(std::strtoull(argv[2], nullptr, 10));
  std::string line;
  while (std::getline(std::cin, line)) std::printf("%s\n", outcome(compiler, tokenizer, line, kind, rng).c_str());
  return 0;
}
