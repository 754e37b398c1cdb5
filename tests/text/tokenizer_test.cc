// SPDX-License-Identifier: Apache-2.0
#include "text/tokenizer/tokenizer.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <random>

#include "base/error.h"
#include "base/json.h"
#include "base/strings.h"
#include "testing/goldens.h"
#include "testing/seed.h"
#include "text/chat/prompt.h"
#include "text/detokenizer.h"
#include "text/stop_matcher.h"
#include "text/tokenizer/deepseek_split.h"

namespace tessera::text {
namespace {

std::string read(const std::string& path) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

const Tokenizer& tiny() {
  static const Tokenizer tokenizer = Tokenizer::load(testing::tiny_model() + "/tokenizer.json");
  return tokenizer;
}

std::vector<int32_t> ids_of(const JsonCursor& list) {
  std::vector<int32_t> ids;
  for (const JsonCursor& id : list.elements()) ids.push_back(static_cast<int32_t>(id.integer(0, 1 << 24)));
  return ids;
}

TEST(Tokenizer, EveryHeldOutPrompt) {
  std::ifstream file(testing::golden_path("tiny-v4-eval.jsonl"));
  int count = 0;
  for (std::string line; std::getline(file, line); ++count) {
    const Json json = Json::parse(line, "eval");
    const JsonCursor root(json, "eval");
    EXPECT_EQ(tiny().encode(root.at("prompt").string()), ids_of(root.at("prompt_ids"))) << count;
  }
  EXPECT_EQ(count, 474);
}

TEST(Tokenizer, PublishedVectorsOfTheRealTokenizer) {
  const char* path = std::getenv("TESSERA_DEEPSEEK_TOKENIZER");
  if (path == nullptr) GTEST_SKIP() << "TESSERA_DEEPSEEK_TOKENIZER does not name the real tokenizer.json";
  const Tokenizer tokenizer = Tokenizer::load(path);
  ASSERT_EQ(tokenizer.encode("Hello").at(0), 19923);
  ASSERT_EQ(tokenizer.added_token("\uFF5CDSML\uFF5C"), 128825);
  const std::string golden = testing::golden_path("tokenizer-vectors.json");
  const Json json = Json::parse(read(golden), golden);
  int count = 0;
  for (const JsonCursor& item : JsonCursor(json, golden).elements()) {
    const std::string& text = item.at("text").string();
    EXPECT_EQ(tokenizer.encode(text), ids_of(item.at("ids"))) << text;
    Detokenizer detokenizer(tokenizer, Detokenizer::Special::kKeep);
    std::string back;
    for (const int32_t id : tokenizer.encode(text)) back += detokenizer.push(id);
    EXPECT_EQ(back + detokenizer.finish(), text);
    ++count;
  }
  EXPECT_GE(count, 18);
}

TEST(Tokenizer, AddedTokensMatchOrNot) {
  const std::string text = "a" + std::string(kUserToken) + "<think>b";
  const std::vector<int32_t> matched = tiny().encode(text);
  EXPECT_NE(std::find(matched.begin(), matched.end(), 3), matched.end());
  const std::vector<int32_t> ignored = tiny().encode(text, AddedTokenMatching::kIgnore);
  EXPECT_EQ(std::find_if(ignored.begin(), ignored.end(), [](int32_t id) { return id < 8; }), ignored.end());
  EXPECT_TRUE(tiny().encode("").empty());
  EXPECT_TRUE(tiny().is_special(0));
  EXPECT_FALSE(tiny().is_special(5));
}

TEST(Tokenizer, TextSurvivesThereAndBack) {
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 500; ++round) {
    std::string text;
    for (uint32_t n = random() % 30; n > 0; --n) {
      const char32_t c = static_cast<char32_t>(random() % (random() % 2 == 0 ? 0x80 : 0x110000));
      if (c < 0xD800 || c > 0xDFFF) append_utf8(text, c);
    }
    Detokenizer detokenizer(tiny(), Detokenizer::Special::kKeep);
    std::string back;
    for (const int32_t id : tiny().encode(text)) {
      const std::string part = detokenizer.push(id);
      EXPECT_TRUE(is_valid_utf8(part));
      back += part;
    }
    EXPECT_EQ(back + detokenizer.finish(), text);
  }
}

TEST(Tokenizer, InvalidUtf8IsReadAsReplacementCharacters) {
  EXPECT_EQ(tiny().encode("a\xff\xe4\xb8z"), tiny().encode("a\uFFFD\uFFFDz"));
}

// A minimal sound file, and what is put in place of a part of it.
std::string with(const std::string& from = "", const std::string& to = "") {
  std::string vocab;
  for (int byte = 0; byte < 256; ++byte) {
    const bool is_self = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    static int next = 0;
    if (byte == 0) next = 0;
    std::string text;
    append_utf8(text, is_self ? static_cast<char32_t>(byte) : static_cast<char32_t>(0x100 + next++));
    if (text == "\"" || text == "\\") text = "\\" + text;
    vocab += "\"" + text + "\":" + std::to_string(byte) + ",";
  }
  std::string json =
      R"({"normalizer":null,"added_tokens":[{"id":300,"content":"<x>","special":true,"lstrip":false}],"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"\\s+"},"behavior":"Isolated","invert":false},{"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]},"model":{"type":"BPE","dropout":null,"vocab":{)" +
      vocab + R"("ab":256,"abc":257},"merges":["a b",["ab","c"]]}})";
  if (!from.empty()) {
    const size_t at = json.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    json.replace(at, from.size(), to);
  }
  return json;
}

TEST(Tokenizer, MergesByRankLeftmostFirst) {
  const Tokenizer tokenizer = Tokenizer::parse(with(), "t");
  EXPECT_EQ(tokenizer.encode("abcab"), (std::vector<int32_t>{257, 256}));
  EXPECT_EQ(tokenizer.encode("aab c<x>"), (std::vector<int32_t>{'a', 256, ' ', 'c', 300}));
  EXPECT_EQ(tokenizer.vocab_size(), 301);
  EXPECT_TRUE(tokenizer.token_bytes(299).empty());
}

TEST(Tokenizer, RefusesWhatItCantDoExactly) {
  const std::pair<const char*, const char*> changes[] = {
      {"\"normalizer\":null", "\"normalizer\":{\"type\":\"NFC\"}"},
      {"\"type\":\"BPE\"", "\"type\":\"Unigram\""},
      {"\"dropout\":null", "\"dropout\":0.1"},
      {"\"dropout\":null", "\"unk_token\":\"<unk>\""},
      {"\"dropout\":null", "\"byte_fallback\":true"},
      {"\"dropout\":null", "\"ignore_merges\":true"},
      {"\"Isolated\"", "\"Removed\""},
      {"\"invert\":false", "\"invert\":true"},
      {"\"type\":\"Split\"", "\"type\":\"Whitespace\""},
      {"\"type\":\"Sequence\"", "\"type\":\"ByteLevel\""},
      {"\"add_prefix_space\":false", "\"add_prefix_space\":true"},
      {"\"use_regex\":false", "\"use_regex\":true"},
      {"\"lstrip\":false", "\"lstrip\":true"},
      {"\"id\":300", "\"id\":-1"},
      {"\"id\":300", "\"id\":99999999999"},
      {"\"content\":\"<x>\"", "\"content\":\"\""},
      {"\"ab\":256", "\"ab\":255"},
      {"\"ab\":256", "\"ab\":-3"},
      {"\"ab\":256", "\"ab\":\"x\""},
      {"\"a b\"", "\"a zz\""},
      {"\"a b\"", "\"ab\""},
      {"\"a b\"", "\"a b c\""},
      {"\"a b\"", "7"},
      {"[\"ab\",\"c\"]", "[\"ab\"]"},
      {"[\"ab\",\"c\"]", "[\"c\",\"ab\"]"},
      {"\"A\":65,", ""},
      {"\\\\s+", "(unclosed"},
      {"\\\\s+", "[^\\\\S]"},
      {"\"merges\"", "\"mergers\""},
      {"\"vocab\"", "\"vocal\""},
      {"\"pre_tokenizer\"", "\"pretokenizer\""},
  };
  for (const auto& [from, to] : changes) {
    try {
      Tokenizer::parse(with(from, to), "tokenizer.json");
      ADD_FAILURE() << from << " -> " << to;
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_TRUE(error.code() == ErrorCode::kDataLoss || error.code() == ErrorCode::kUnsupported) << message;
      EXPECT_EQ(message.find("tokenizer.json"), 0u) << message;
      EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    }
  }
  const std::string whole = with();
  for (size_t size = 0; size < whole.size(); size += 13)
    EXPECT_THROW(Tokenizer::parse(whole.substr(0, size), "t"), Error) << size;
}

TEST(Tokenizer, AHostilePatternGivesUpInsteadOfHanging) {
  const Tokenizer tokenizer = Tokenizer::parse(with("\\\\s+", "(a|aa)+$"), "t");
  EXPECT_THROW(tokenizer.encode(std::string(60, 'a') + "b"), Error);
}

TEST(Detokenizer, HoldsBackUnfinishedCharacters) {
  // Bytes of U+1F642, one token each.
  const std::vector<int32_t> ids = tiny().encode("\U0001F642");
  ASSERT_GE(ids.size(), 2u);
  Detokenizer detokenizer(tiny(), Detokenizer::Special::kSkip);
  std::string text;
  for (size_t i = 0; i + 1 < ids.size(); ++i) text += detokenizer.push(ids[i]);
  EXPECT_EQ(text, "");
  EXPECT_EQ(detokenizer.push(ids.back()), "\U0001F642");
  detokenizer.push(ids[0]);
  EXPECT_EQ(detokenizer.finish(), "\uFFFD");
  EXPECT_EQ(detokenizer.push(0), "") << "special tokens are not shown";
  EXPECT_EQ(detokenizer.push(-1), "");
  EXPECT_EQ(detokenizer.push(1 << 20), "");
}

TEST(StopMatcher, AnySplittingGivesTheSameText) {
  const std::string text = "one two STOQ STOP three";
  for (size_t step = 1; step < text.size(); ++step) {
    StopMatcher matcher({"STOP", "zzz"});
    std::string shown;
    for (size_t at = 0; at < text.size(); at += step) shown += matcher.push(text.substr(at, step));
    EXPECT_EQ(shown, "one two STOQ ") << step;
    EXPECT_TRUE(matcher.has_matched());
    EXPECT_EQ(matcher.matched(), "STOP");
    EXPECT_EQ(matcher.push("more"), "");
  }
  StopMatcher held({"abc"});
  EXPECT_EQ(held.push("xab"), "x");
  EXPECT_EQ(held.finish(), "ab");
  StopMatcher earliest({"bc", "abc"});
  EXPECT_EQ(earliest.push("xabc"), "x") << "the stop string that begins first";
  StopMatcher none({});
  EXPECT_EQ(none.push("abc"), "abc");
}

TEST(Chat, OneUserTurn) {
  EXPECT_EQ(tiny().encode(render_user_turn({"", "87+42=", Thinking::kOff})),
            (std::vector<int32_t>{0, 3, 31, 30, 18, 27, 25, 36, 4, 6}));
  EXPECT_EQ(tiny().encode(render_user_turn({"", "x", Thinking::kOn})).back(), 5);
  EXPECT_EQ(render_user_turn({"Be brief.", "Hi", Thinking::kOff}), std::string(kBosToken) + "Be brief." +
                                                                       std::string(kUserToken) + "Hi" +
                                                                       std::string(kAssistantToken) + "</think>");
  EXPECT_NO_THROW(check_chat_tokens(tiny(), "t"));
  EXPECT_THROW(check_chat_tokens(Tokenizer::parse(with(), "t"), "t"), Error);
}

// The splits in one pass against the expressions, one after the other.
class Splits {
 public:
  explicit Splits(std::string numbers)
      : expressions_{std::move(numbers), "[一-龥぀-ゟ゠-ヿ]+",
                     "[!\"#$%&'()*+,\\-./"
                     ":;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
                     " ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},
        own_(DeepSeekSplit::find(expressions_, "test")) {
    for (const std::string& expression : expressions_) stages_.emplace_back(expression, "test");
  }
  const std::vector<std::string>& expressions() const { return expressions_; }
  void expect_same(std::string_view text) {
    pieces_ = {text};
    for (const RegexSplit& stage : stages_) {
      finer_.clear();
      for (const std::string_view piece : pieces_) stage.split(piece, finer_);
      pieces_.swap(finer_);
    }
    finer_.clear();
    own_->split(text, finer_);
    ASSERT_EQ(finer_, pieces_) << printable(text);
  }

 private:
  const std::vector<std::string> expressions_;
  const std::unique_ptr<DeepSeekSplit> own_;
  std::vector<RegexSplit> stages_;
  std::vector<std::string_view> pieces_, finer_;
};

TEST(DeepSeekSplit, EqualsTheExpressionsForEveryScalarInContext) {
  const bool is_every = std::getenv("TESSERA_EVERY_SCALAR") != nullptr;
  std::mt19937_64 random(fresh_seed());
  Splits splits("\\p{N}{1,3}");
  const char32_t step = is_every ? 1 : 64;
  std::string text;
  for (char32_t code_point = is_every ? 0 : static_cast<char32_t>(random() % step); code_point < 0x110000;
       code_point += step) {
    if (code_point >= 0xD800 && code_point < 0xE000) continue;
    for (const auto& [before, after] : {std::pair("", ""), {"a", "b"}, {" ", " x"}, {"12", "34"}, {"\n ", "!\n"}}) {
      text = before;
      append_utf8(text, code_point);
      text += after;
      splits.expect_same(text);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(DeepSeekSplit, EqualsTheExpressionsForRandomTexts) {
  std::mt19937_64 random(fresh_seed());
  const std::vector<std::string> parts = {
      "a", "Zz", "é",  "e\u0301", "\u0301", "中",   "国", "ア",   "・",         "゠",     "゛",     "1",      "٣",
      "½", "Ⅷ",  " ",  "  ",      "\t",     "\n",   "\r", "\r\n", "\u00a0",     "\u3000", "\u2028", "\u200b", "!",
      "_", "-",  "。", "€",       "+",      "🙂", "𝟙",  "\x01", "\U0001E900", "〇",     "\u180e", "\u0378"};
  for (const char* numbers : {"\\p{N}", "\\p{N}{1,3}"}) {
    Splits splits(numbers);
    for (int i = 0; i < 20000; ++i) {
      std::string text;
      for (uint64_t n = random() % 12; n > 0; --n) {
        const std::string& part = parts[random() % parts.size()];
        for (uint64_t k = 1 + random() % 3; k > 0; --k) text += part;
      }
      splits.expect_same(text);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(DeepSeekSplit, IsForItsExpressionsAlone) {
  std::vector<std::string> expressions = Splits("\\p{N}").expressions();
  for (const auto& [escape, raw] : {std::pair("\\r", "\r"), {"\\n", "\n"}}) {
    for (size_t at = 0; (at = expressions[2].find(escape)) != std::string::npos;) expressions[2].replace(at, 2, raw);
  }
  EXPECT_NE(DeepSeekSplit::find(expressions, "test"), nullptr) << "with line ends as they are";
  expressions[2] += " ";
  EXPECT_EQ(DeepSeekSplit::find(expressions, "test"), nullptr);
  expressions = Splits("\\p{N}").expressions();
  expressions.emplace_back("x");
  EXPECT_EQ(DeepSeekSplit::find(expressions, "test"), nullptr);
  expressions = Splits("\\p{N}").expressions();
  expressions[0] = "\\p{N}{1,2}";
  EXPECT_EQ(DeepSeekSplit::find(expressions, "test"), nullptr);
}

// Pieces that come again are copied from where they came first: a long text gives what its lines give one by one.
TEST(Tokenizer, ALongTextGivesTheTokensOfItsLines) {
  std::mt19937_64 random(fresh_seed());
  std::string text;
  std::vector<int32_t> expected;
  for (int i = 0; i < 3000; ++i) {
    std::string line = "line";
    for (uint64_t n = random() % 6; n > 0; --n) {
      line += ' ';
      for (uint64_t k = 1 + random() % 5; k > 0; --k) line += static_cast<char>('a' + random() % 3);
    }
    line += '\n';
    const std::vector<int32_t> ids = tiny().encode(line);
    expected.insert(expected.end(), ids.begin(), ids.end());
    text += line;
  }
  EXPECT_EQ(tiny().encode(text), expected);
}

TEST(Pattern, Translation) {
  EXPECT_EQ(translate_pattern("a\\d[xy]", "w"), "a\\d[xy]");
  EXPECT_EQ(translate_pattern("\\s", "w").front(), '[');
  EXPECT_EQ(translate_pattern("[\\s]", "w").substr(0, 2), "[\\");
  EXPECT_NE(translate_pattern("\\p{L}", "w").find("\\x{"), std::string::npos);
  EXPECT_EQ(translate_pattern("[]\\]]x", "w"), "[]\\]]x") << "a bracket right after the opening one is literal";
  EXPECT_THROW(translate_pattern("[\\S]", "w"), Error);
}

}  // namespace
}  // namespace tessera::text
