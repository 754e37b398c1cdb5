// SPDX-License-Identifier: Apache-2.0
#include "server/grammar_constraint.h"

#include <gtest/gtest.h>

#include "server/api_error.h"
#include "server/thinking_budget.h"
#include "text/chat/answer_parser.h"
#include "text/chat/markers.h"

namespace tessera::server {
namespace {

const text::Tokenizer& tiny() {
  static const text::Tokenizer tokenizer = text::Tokenizer::load(TESSERA_SOURCE_DIR "/models/tiny-v4/tokenizer.json");
  return tokenizer;
}

class GrammarConstraint : public ::testing::Test {
 protected:
  std::shared_ptr<const engine::ConstraintSource> made(const ChatRequest& request, bool reasons,
                                                       Compiling compiling = Compiling::kAny) {
    return make_constraint(request, reasons, grammars_, tiny(), ends_, compiling);
  }
  bool allows(engine::TokenConstraint& constraint, int32_t id) const {
    std::vector<uint32_t> mask(static_cast<size_t>((tiny().vocab_size() + 31) / 32), 0);
    const auto allowed = constraint.allowed(mask);
    return allowed == engine::TokenConstraint::Allowed::kAll ||
           (allowed == engine::TokenConstraint::Allowed::kSome &&
            (mask[static_cast<size_t>(id / 32)] >> (id % 32) & 1) != 0);
  }
  // One byte each: a marker spelled in them is not the marker's token.
  std::vector<int32_t> bytes_of(std::string_view text) const {
    std::vector<int32_t> ids;
    for (const char byte : text) {
      for (int32_t id = 0; id < tiny().vocab_size(); ++id) {
        if (tiny().token_bytes(id) != std::string_view(&byte, 1)) continue;
        ids.push_back(id);
        break;
      }
    }
    EXPECT_EQ(ids.size(), text.size());
    return ids;
  }
  int32_t token(std::string_view text) const { return tiny().added_token(text).value(); }

  const std::vector<int32_t> ends_ = {token(text::kEosToken)};
  text::GrammarCompiler grammars_{tiny(), tiny().vocab_size(), ends_};
};

ChatRequest with_pattern(const std::string& pattern) {
  ChatRequest request;
  request.format = {OutputFormat::Kind::kRegex, pattern, "format"};
  return request;
}

TEST_F(GrammarConstraint, ReasoningEndsByItsTokenAlone) {
  const auto answer = made(with_pattern("yes|no"), true);
  const auto constraint = answer->begin();
  for (const std::string_view marker : {text::kEndThinkToken, text::kDsmlToken}) {
    std::vector<int32_t> ids = bytes_of(marker);
    for (int i = 0; i < 2; ++i) {
      for (size_t k = 0; k + 1 < ids.size(); ++k) {
        ASSERT_TRUE(allows(*constraint, ids[k])) << marker << " " << k;
        constraint->drawn(ids[k]);
      }
      EXPECT_FALSE(allows(*constraint, ids.back())) << "it would be spelled out: " << marker;
    }
    constraint->drawn(bytes_of("x")[0]);
    EXPECT_TRUE(allows(*constraint, ids.back())) << "what was begun is no more: " << marker;
  }
  EXPECT_FALSE(allows(*constraint, token(text::kEosToken)));
  ASSERT_TRUE(allows(*constraint, token(text::kEndThinkToken)));
  constraint->drawn(token(text::kEndThinkToken));
  EXPECT_TRUE(allows(*constraint, bytes_of("y")[0]));
  EXPECT_FALSE(allows(*constraint, bytes_of("x")[0]));
}

// After the budget the end of the reasoning is all that may come, then what the grammar says; reasoning that ended
// earlier, by its token or spelled out, is not ended again.
TEST_F(GrammarConstraint, ABudgetLeavesTheEndOfTheReasoningAlone) {
  const int32_t end = token(text::kEndThinkToken), x = bytes_of("x")[0], y = bytes_of("y")[0];
  const auto held = with_thinking_budget({2, end}, made(with_pattern("yes|no"), true), nullptr, tiny(), ends_);
  for (const bool is_early : {false, true}) {
    const auto constraint = held->begin();
    for (const int32_t id : is_early ? std::vector<int32_t>{x} : std::vector<int32_t>{x, x}) {
      EXPECT_TRUE(allows(*constraint, id));
      constraint->drawn(id);
    }
    EXPECT_EQ(allows(*constraint, x), is_early);
    EXPECT_TRUE(allows(*constraint, end));
    constraint->drawn(end);
    EXPECT_TRUE(allows(*constraint, y));
    EXPECT_FALSE(allows(*constraint, x));
    EXPECT_FALSE(allows(*constraint, end));
  }
  const auto mask = std::make_shared<std::vector<uint32_t>>(engine::mask_without(x, tiny().vocab_size()));
  for (const auto& allowed : {mask, decltype(mask)()}) {
    const auto cut = with_thinking_budget({1, end}, nullptr, allowed, tiny(), ends_)->begin();
    EXPECT_EQ(cut->shared_mask().data(), allowed == nullptr ? nullptr : allowed->data());
    cut->drawn(y);
    EXPECT_TRUE(cut->shared_mask().empty());
    EXPECT_FALSE(allows(*cut, y));
    EXPECT_TRUE(allows(*cut, end));
    cut->drawn(end);
    EXPECT_TRUE(allows(*cut, y));
    EXPECT_EQ(allows(*cut, x), allowed == nullptr);
    EXPECT_FALSE(allows(*cut, end)) << "it has ended";
    EXPECT_TRUE(cut->shared_mask().empty());
  }
  const auto none = with_thinking_budget({0, end}, nullptr, nullptr, tiny(), ends_)->begin();
  EXPECT_TRUE(allows(*none, x));
  EXPECT_FALSE(allows(*none, end)) << "it stands in the prompt";
  const auto free = with_thinking_budget({20, end}, nullptr, mask, tiny(), ends_)->begin();
  for (const int32_t id : bytes_of(text::kEndThinkToken)) {
    EXPECT_EQ(free->shared_mask().data(), mask->data());
    free->drawn(id);
  }
  EXPECT_EQ(free->shared_mask().data(), mask->data());
  for (int i = 0; i < 30; ++i) {
    EXPECT_TRUE(allows(*free, y));
    EXPECT_FALSE(allows(*free, x));
    free->drawn(y);
  }
}

TEST_F(GrammarConstraint, CallsBeginByTheMarkupsTokenAlone) {
  ChatRequest request;
  request.tools.tools = {{"f", R"({"type":"object","properties":{}})", true}};
  const auto answer = made(request, false);
  const auto constraint = answer->begin();
  const std::vector<int32_t> ids = bytes_of(text::kDsmlToken);
  for (size_t k = 0; k + 1 < ids.size(); ++k) {
    ASSERT_TRUE(allows(*constraint, ids[k]));
    constraint->drawn(ids[k]);
  }
  EXPECT_FALSE(allows(*constraint, ids.back()));
  EXPECT_TRUE(allows(*constraint, token(text::kDsmlToken)));
}

TEST_F(GrammarConstraint, WhatIsNotKnownIsCompiledOnlyWhereItMay) {
  const ChatRequest good = with_pattern("ab+");
  ChatRequest bad;  // what only the compiler refuses
  bad.format = {OutputFormat::Kind::kJsonSchema, R"({"oneOf":[{"type":"string"},{"type":"string","maxLength":3}]})",
                "format"};
  EXPECT_THROW(made(good, false, Compiling::kKnownOnly), GrammarUnknown);
  EXPECT_THROW(made(bad, false, Compiling::kKnownOnly), GrammarUnknown);
  EXPECT_NE(made(good, false), nullptr);
  EXPECT_THROW(made(bad, false), RequestError);
  // A refusal is known as well.
  EXPECT_NE(made(good, false, Compiling::kKnownOnly), nullptr);
  EXPECT_THROW(made(bad, false, Compiling::kKnownOnly), RequestError);
  EXPECT_EQ(grammars_.stats().num_misses, 2u);
}

TEST_F(GrammarConstraint, StrictToolsAreRefusedWhatIsLeftOut) {
  const std::string bounded =
      R"({"type":"object","properties":{"a":{"type":"array","items":{"type":"string","pattern":"^a+$","minLength":3}}}})";
  ChatRequest request;
  request.tools.choice = ToolChoice::kRequired;
  request.tools.tools = {{"loose", bounded, false}};
  EXPECT_NE(made(request, false), nullptr);
  request.tools.tools.push_back({"tight", bounded, true});
  try {
    made(request, false);
    FAIL() << "its length is not held";
  } catch (const RequestError& error) {
    EXPECT_NE(std::string(error.what()).find("tool \"tight\""), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace tessera::server
