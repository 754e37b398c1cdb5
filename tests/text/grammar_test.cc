// SPDX-License-Identifier: Apache-2.0
#include "text/grammar/grammar.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "base/error.h"
#include "base/json.h"
#include "base/rng.h"
#include "base/strings.h"
#include "base/test_seams.h"
#include "testing/failing_new.h"
#include "testing/goldens.h"
#include "text/chat/answer_parser.h"
#include "text/chat/markers.h"
#include "text/grammar/schema_fault.h"

namespace tessera::text {
namespace {

using ::testing::HasSubstr;
using Content = GrammarDefinition::Content;

const Tokenizer& tiny() {
  static const Tokenizer tokenizer = Tokenizer::load(testing::tiny_model() + "/tokenizer.json");
  return tokenizer;
}

int32_t end_id() {
  return tiny().added_token(kEosToken).value();
}

GrammarCompiler& compiler() {
  static const int32_t kEnds[] = {end_id()};
  static GrammarCompiler made(tiny(), tiny().vocab_size(), kEnds);
  return made;
}

GrammarDefinition schema(std::string text) {
  GrammarDefinition definition;
  definition.content = Content::kJsonSchema;
  definition.text = std::move(text);
  return definition;
}

GrammarDefinition regex(std::string text) {
  GrammarDefinition definition;
  definition.content = Content::kRegex;
  definition.text = std::move(text);
  return definition;
}

GrammarDefinition calls(bool allows_parallel = true) {
  GrammarDefinition definition;
  definition.tools = {
      {"add",
       R"({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]})"},
      {"note", R"({"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]})"},
      {"now", R"({"type": "object", "properties": {}})"},
      {"any", ""}};
  definition.allows_parallel = allows_parallel;
  return definition;
}

bool allows(const std::vector<uint32_t>& mask, int32_t id) {
  return (mask[static_cast<size_t>(id / 32)] >> (id % 32) & 1) != 0;
}

std::vector<uint32_t> mask_of(GrammarMatcher& matcher) {
  std::vector<uint32_t> mask(static_cast<size_t>((tiny().vocab_size() + 31) / 32));
  if (!matcher.fill(mask)) mask.clear();
  return mask;
}

// Feeds the text's tokens and the end; each is held against the mask before it. The part that was taken.
std::string taken(const GrammarDefinition& definition, const std::string& text) {
  const auto grammar = compiler().compile(definition);
  const auto matcher = grammar->begin();
  std::string out;
  std::vector<int32_t> ids = tiny().encode(text);
  ids.push_back(end_id());
  for (const int32_t id : ids) {
    const std::vector<uint32_t> mask = mask_of(*matcher);
    const bool is_allowed = !mask.empty() && allows(mask, id);
    EXPECT_EQ(matcher->accept(id), is_allowed) << "after " << out;
    if (!is_allowed) return out;
    out += id == end_id() ? "$" : tiny().token_bytes(id);
  }
  EXPECT_TRUE(matcher->has_ended());
  EXPECT_TRUE(mask_of(*matcher).empty());
  return out;
}

bool is_whole(const GrammarDefinition& definition, const std::string& text) {
  return taken(definition, text) == text + "$";
}

std::string fault_of(const GrammarDefinition& definition) {
  try {
    compiler().compile(definition);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "";
}

// Draws tokens that are allowed until the end or `most` of them; nothing where it did not end.
std::optional<std::string> drawn(const GrammarDefinition& definition, uint64_t seed, int most) {
  const auto matcher = compiler().compile(definition)->begin();
  Rng rng(seed);
  std::string out;
  for (int i = 0; i < most; ++i) {
    const std::vector<uint32_t> mask = mask_of(*matcher);
    std::vector<int32_t> ids;
    for (int32_t id = 0; !mask.empty() && id < tiny().vocab_size(); ++id) {
      if (allows(mask, id)) ids.push_back(id);
    }
    if (ids.empty()) {
      ADD_FAILURE() << "no token after " << out;
      return std::nullopt;
    }
    const int32_t id = ids[rng.below(ids.size())];
    EXPECT_TRUE(matcher->accept(id)) << id;
    if (matcher->has_ended()) return out;
    out += tiny().token_bytes(id);
  }
  return std::nullopt;
}

TEST(Grammar, ASchemaTakesWhatItDescribesAndStopsAtTheFirstOtherToken) {
  const GrammarDefinition person = schema(
      R"({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}}, "required": ["name", "age"]})");
  EXPECT_TRUE(is_whole(person, R"({"name": "Ann", "age": 41})"));
  EXPECT_FALSE(is_whole(person, R"({"name": "Ann"})"));
  EXPECT_FALSE(is_whole(person, R"({"name": "Ann", "age": 151})"));
  EXPECT_FALSE(is_whole(person, R"({"name": "Ann", "age": 41, "more": 1})"));
  EXPECT_EQ(taken(person, "Here"), "");
  EXPECT_EQ(taken(person, R"({"name": "Ann", "age": 41} and)"), R"({"name": "Ann", "age": 41})");
}

TEST(Grammar, AnyJsonIsAnObject) {
  GrammarDefinition any;
  any.content = Content::kJson;
  EXPECT_TRUE(is_whole(any, R"({"a": [1, 2.5, null], "b": {"c": "x\n"}})"));
  EXPECT_FALSE(is_whole(any, "[1]"));
  EXPECT_FALSE(is_whole(any, R"({"a": 1)"));
}

TEST(Grammar, ARegularExpressionIsOfTheWholeAnswer) {
  EXPECT_TRUE(is_whole(regex("(yes|no), [0-9]{2}"), "yes, 42"));
  EXPECT_FALSE(is_whole(regex("(yes|no), [0-9]{2}"), "yes, 4"));
  EXPECT_EQ(taken(regex("(yes|no)"), "maybe"), "");
}

TEST(Grammar, SpecialTokensAreNoText) {
  const auto matcher = compiler().compile(regex(".*"))->begin();
  const std::vector<uint32_t> mask = mask_of(*matcher);
  for (const std::string_view marker :
       {kBosToken, kUserToken, kAssistantToken, kThinkToken, kEndThinkToken, kDsmlToken}) {
    const int32_t id = tiny().added_token(marker).value();
    EXPECT_FALSE(allows(mask, id)) << marker;
    EXPECT_FALSE(matcher->accept(id)) << marker;
  }
  EXPECT_TRUE(allows(mask, end_id()));
}

TEST(Grammar, CallsAreInTheFormatThatTheParserTakes) {
  const std::string block =
      "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"add\">\n<｜DSML｜parameter name=\"a\" "
      "string=\"false\">2</｜DSML｜parameter>\n<｜DSML｜parameter name=\"b\" "
      "string=\"false\">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"note\">\n<｜DSML｜parameter "
      "name=\"text\" string=\"true\">say \"hi\"\nline 2 < 3</｜DSML｜parameter>\n</｜DSML｜invoke>\n"
      "</｜DSML｜tool_calls>";
  EXPECT_EQ(taken(calls(), block), block + "$");
  EXPECT_NE(taken(calls(false), block), block + "$");  // two calls
  const std::string rest = block.substr(block.find("tool_calls"));
  GrammarDefinition in_block = calls();
  in_block.is_in_block = true;
  EXPECT_EQ(taken(in_block, rest), rest + "$");
  EXPECT_EQ(taken(calls(), "Hello"), "");
  // The markup has no other form.
  const std::string none =
      "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"now\">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";
  EXPECT_EQ(taken(calls(), none), none + "$");
  for (const auto& [written, other] : {std::pair{"name=\"add\">\n", "name=\"add\">"},
                                       {"name=\"add\">\n", "name=\"add\">\n\n"},
                                       {"parameter>\n<", "parameter> <"},
                                       {"parameter>\n</", "parameter> </"},
                                       {">2<", "> 2<"},
                                       {">2<", ">2 <"}}) {
    std::string changed = block;
    changed.replace(block.find(written), std::string_view(written).size(), other);
    EXPECT_NE(taken(calls(), changed), changed + "$") << changed;
  }
  EXPECT_THAT(taken(calls(), "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"sub\">\n"), HasSubstr("name=\""));
}

TEST(Grammar, WhatIsDrawnParses) {
  const GrammarDefinition object = schema(
      R"({"type": "object", "properties": {"kind": {"enum": ["a", "b", 3, null]}, "n": {"type": "integer", "minimum": -20, "maximum": 99}, "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 1, "maxItems": 3}, "ok": {"type": "boolean"}}, "required": ["kind", "n", "tags", "ok"], "additionalProperties": false})");
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const auto text = drawn(object, seed, 400);
    ASSERT_TRUE(text);
    ASSERT_NO_THROW(Json::parse(*text, "drawn")) << printable(*text);
    const Json json = Json::parse(*text, "drawn");
    ASSERT_EQ(json.object().size(), 4u) << *text;
    EXPECT_LE(json.find("tags")->array().size(), 3u) << *text;
    EXPECT_GE(json.find("n")->integer(), -20) << *text;
    EXPECT_LE(json.find("n")->integer(), 99) << *text;
    EXPECT_EQ(json.find("ok")->kind(), Json::Kind::kBool) << *text;
  }
}

TEST(Grammar, CallsThatAreDrawnHaveArgumentsOfTheirTools) {
  GrammarDefinition bounded;
  bounded.tools = {
      {"add",
       R"({"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", 4]}}, "required": ["a", "b"]})"},
      {"now", R"({"type": "object", "properties": {}})"}};
  bounded.allows_parallel = false;
  for (uint64_t seed = 0; seed < 30; ++seed) {
    const auto text = drawn(bounded, seed, 400);
    ASSERT_TRUE(text);
    AnswerParser parser(false);
    parser.push(*text);
    parser.finish(Ending::kEndToken);
    ASSERT_EQ(parser.answer().calls.size(), 1u) << *text;
    EXPECT_EQ(parser.answer().fault, "") << *text;
    const ParsedCall& call = parser.answer().calls[0];
    EXPECT_TRUE(call.is_complete);
    const Json arguments = Json::parse(call.arguments, "arguments");
    EXPECT_EQ(arguments.object().size(), call.name == "add" ? 2u : 0u) << *text;
  }
}

TEST(Grammar, WhatTheCompilerRefusesIsSaidInItsWords) {
  EXPECT_EQ(fault_of(schema(R"({"type": "number", "multipleOf": 0.3})")),
            "multipleOf is not supported for type:number");
  EXPECT_EQ(fault_of(schema(R"({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]})")),
            "oneOf with overlapping or non-provably-disjoint branches cannot be represented exactly");
  EXPECT_NE(fault_of(schema(R"({"$ref": "#/$defs/none"})")), "");
  EXPECT_NE(fault_of(regex("(a")), "");
  EXPECT_NE(fault_of(schema(R"({"type": "integer", "minimum": 5, "maximum": 4})")), "");
  EXPECT_EQ(fault_of(schema(R"({"type": "integer", "minimum": 1e30})")), "Integer exceeds maximum limit");
}

// A format is an annotation beside a pattern.
TEST(Grammar, APatternCountsBesideAFormat) {
  const GrammarDefinition id = schema(R"({"type": "string", "format": "uuid", "pattern": "^[a-f]{2}$"})");
  EXPECT_TRUE(is_whole(id, "\"ab\""));
  EXPECT_EQ(taken(id, "\"0"), "\"");
}

TEST(Grammar, PatternsMakeStringsThatAreJson) {
  for (const char* pattern :
       {R"([^a]{1,4})", R"(\\S{2,3})", R"(.{1,3})", R"([\"b]c)", R"(a\"b\\n)", R"(a\\\\b)", "[äöü]{2}"}) {
    const GrammarDefinition definition = schema(std::string(R"({"type": "string", "pattern": ")") + pattern + "\"}");
    for (uint64_t seed = 0; seed < 20; ++seed) {
      const auto text = drawn(definition, seed, 50);
      ASSERT_TRUE(text) << pattern;
      // Bytes that a token begins and none goes on with are no text; the server shows them so.
      const std::string shown = replace_invalid_utf8(*text);
      SCOPED_TRACE(std::string(pattern) + ": " + printable(*text));
      EXPECT_EQ(Json::parse(shown, "answer").kind(), Json::Kind::kString);
    }
  }
}

// What the compiler's automata took beside it before they were mended; and the time that texts take which fit in many
// ways.
TEST(Grammar, PatternsHoldExactly) {
  EXPECT_TRUE(is_whole(regex("[0-9]{1,2}([.][0-9]{1,2})?"), "97.1"));
  EXPECT_FALSE(is_whole(regex("[0-9]{1,2}([.][0-9]{1,2})?"), "997"));
  EXPECT_FALSE(is_whole(regex("(a{1,2}b{1,2})?c"), "bc"));
  EXPECT_FALSE(is_whole(regex("(a,*|b){2,}"), "ab,"));
  EXPECT_FALSE(is_whole(regex("xz?|x"), "xzz"));
  EXPECT_TRUE(is_whole(regex("(.+)+c"), "a word and another one, and so on, and so on, and so on, and so on: abc"));
  EXPECT_FALSE(is_whole(regex("."), "\n"));
}

TEST(Grammar, RefusalsAreKnownAndMasksHaveALimit) {
  const int32_t ends[] = {end_id()};
  GrammarCompiler::Limits limits;
  limits.mask_seconds = -1;
  GrammarCompiler compiler(tiny(), tiny().vocab_size(), ends, limits);
  EXPECT_FALSE(compiler.knows(regex("(a")));
  for (int i = 0; i < 3; ++i) EXPECT_THROW(compiler.compile(regex("(a")), Error);
  EXPECT_TRUE(compiler.knows(regex("(a")));
  EXPECT_EQ(compiler.stats().num_misses, 1u);
  EXPECT_EQ(compiler.stats().num_hits, 2u);
  try {
    compiler.compile(regex("a"));
    FAIL() << "no first mask is made in less than no time";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("expected the tokens that may come next within"));
  }
  EXPECT_TRUE(compiler.knows(regex("a")));
}

TEST(Grammar, WhatWasCompiledIsKeptWithinItsBudget) {
  const int32_t ends[] = {end_id()};
  GrammarCompiler::Limits limits;
  limits.cache_bytes = 2 * GrammarCompiler(tiny(), tiny().vocab_size(), ends).compile(regex("a"))->size_bytes() + 64;
  GrammarCompiler small(tiny(), tiny().vocab_size(), ends, limits);
  const auto first = small.compile(regex("a"));
  EXPECT_EQ(small.compile(regex("a")), first);
  for (const char* pattern : {"b", "c", "d"}) small.compile(regex(pattern));
  EXPECT_LE(small.stats().bytes, limits.cache_bytes);
  EXPECT_EQ(small.stats().num_hits, 1u);
  EXPECT_NE(small.compile(regex("a")), first);
  limits.grammar_bytes = 1;
  GrammarCompiler none(tiny(), tiny().vocab_size(), ends, limits);
  EXPECT_THROW(none.compile(regex("a")), Error);
}

TEST(Grammar, WhatNoAnswerFitsIsRefused) {
  const GrammarDefinition cycle =
      schema(R"({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}})");
  try {
    compiler().compile(cycle);
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("found one that none fits"));
  }
  EXPECT_TRUE(compiler().knows(cycle));
}

#ifdef TESSERA_TEST_SEAMS
// Whichever allocation fails, a grammar is kept whole or not at all, and can be had once there is memory.
TEST(Grammar, MemoryThatEndsLeavesNothingHalfKept) {
  if (!seams::can_new_fail()) GTEST_SKIP() << "operator new is a sanitizer's";
  const int32_t ends[] = {end_id()};
  GrammarCompiler compiler(tiny(), tiny().vocab_size(), ends);
  seams::fail_allocation(0);
  const size_t one = compiler.compile(regex("(yes|no)!0"))->size_bytes();
  const int64_t total = seams::num_allocations();
  // Of the last ones, which keep it, all; of the others a sample. Longer patterns take more of them.
  size_t num_failed = 0, num_made = 1;
  bool is_past_all = false;
  for (int64_t nth = 1; !is_past_all; nth += nth < total - 20 ? 1 + total / 40 : 1) {
    const GrammarDefinition definition = regex(fmt::format("(yes|no)!{:05}", nth));
    seams::fail_allocation(nth);
    try {
      compiler.compile(definition);
    } catch (const std::bad_alloc&) {
      ++num_failed;
    }
    is_past_all = seams::num_allocations() < nth;
    seams::fail_allocation(0);
    EXPECT_NE(compiler.compile(definition), nullptr) << nth;
    ++num_made;
    EXPECT_TRUE(compiler.knows(definition)) << nth;
    ASSERT_EQ(compiler.stats().num_kept, num_made) << nth << " of " << total;
  }
  EXPECT_GT(num_failed, num_made / 2);
  EXPECT_GE(compiler.stats().bytes, num_made * one / 2);
}
#endif

}  // namespace
}  // namespace tessera::text
