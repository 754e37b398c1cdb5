// SPDX-License-Identifier: Apache-2.0
#include "base/json.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/error.h"

namespace tessera {
namespace {

std::string error_of(const std::string& text) {
  try {
    Json::parse(text, "file.json");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDataLoss);
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << "one line";
    return error.what();
  }
  return "";
}

TEST(Json, ReadsEveryKind) {
  const Json json = Json::parse(R"({"a": [1, -2.5, true, null, "x\u00e9"], "b": {}})", "f");
  const std::vector<Json>& a = json.find("a")->array();
  EXPECT_EQ(a[0].integer(), 1);
  EXPECT_EQ(a[1].number(), -2.5);
  EXPECT_TRUE(a[2].boolean());
  EXPECT_EQ(a[3].kind(), Json::Kind::kNull);
  EXPECT_EQ(a[4].string(), "x\u00e9");
  EXPECT_EQ(json.find("c"), nullptr);
}

TEST(Json, RefusesWhatIsNotOneStrictValue) {
  for (const std::string text :
       {"", " ", "{", "{} {}", "{\"a\":1,}", "[1 2]", "tru", "NaN", "{'a':1}", "\"\\ud800\"", "\"a\x01\"", "01",
        "1e999", "99999999999999999999", "{\"a\":1,\"a\":2}", "{\"x\":{\"b\":1,\"b\":1}}", "\xff", "[\"\xc3\"]"}) {
    EXPECT_NE(error_of(text), "") << text;
  }
  EXPECT_NE(error_of(std::string(5000, '[') + std::string(5000, ']')), "") << "depth";
  EXPECT_NE(error_of(R"({"a":1,"a":2})").find("\"a\" twice"), std::string::npos);
}

TEST(Json, RefusesWhatOtherReadersForgive) {
  EXPECT_NE(error_of("\xEF\xBB\xBF{}"), "") << "a byte order mark";
  EXPECT_NE(error_of(std::string("{}\0", 3)), "") << "a zero byte";
  EXPECT_NE(error_of(std::string("{}\0{", 4)), "");
  EXPECT_NE(error_of("18446744073709551615"), "");
  EXPECT_EQ(error_of(R"({"a":[{"b":0},{"b":1,"b":2}]})"),
            "file.json: field a[1]: expected every key once, found key \"b\" twice");
}

TEST(Json, LimitsTheNumberOfValues) {
  EXPECT_NO_THROW(Json::parse("[1,2,3]", "f", 4));
  EXPECT_THROW(Json::parse("[1,2,3]", "f", 3), Error);
}

TEST(Json, GivesMembersOneByOne) {
  struct Sizes final : JsonMemberSink {
    void member(std::string&& key, Json&& value) override {
      seen += key + "=" + std::to_string(value.array().size()) + ";";
    }
    std::string seen;
  } sizes;
  const auto read = [&](const std::string& text) { Json::parse_members(text, "f", 3, sizes); };
  read(R"({"a": [1, 2], "b": {}, "c": [3, 4]})");
  EXPECT_EQ(sizes.seen, "a=2;b=0;c=2;") << "the limit counts each member by itself";
  EXPECT_THROW(read(R"({"a": [1, 2, 3]})"), Error);
  EXPECT_THROW(read(R"({"a": 1, "a": 1})"), Error);
  for (const char* text : {"[]", "1", "null", "", "{\"a\":1", "{}{}"}) EXPECT_THROW(read(text), Error) << text;
}

TEST(Json, ExactIntegersHaveNoFraction) {
  const Json json = Json::parse("[1, 1.0, 1e0]", "f");
  const auto items = JsonCursor(json, "f").elements();
  EXPECT_EQ(items[0].exact_integer(0, 9), 1);
  EXPECT_THROW(items[1].exact_integer(0, 9), Error);
  EXPECT_THROW(items[2].exact_integer(0, 9), Error);
}

TEST(Json, PythonReaderKeepsWhatPythonKeeps) {
  const Json json = Json::parse_python(
      R"( {"big": -123456789012345678901234567890, "a": 1, "b": [NaN, -Infinity, 1e999, -0.0], "a": "\ud83d\ude42"} )",
      "f");
  ASSERT_EQ(json.object().size(), 3u);
  EXPECT_EQ(json.object()[0].second.kind(), Json::Kind::kBigInt);
  EXPECT_EQ(json.object()[0].second.big_integer(), "-123456789012345678901234567890");
  EXPECT_EQ(json.object()[1].first, "a") << "the first place";
  EXPECT_EQ(json.object()[1].second.string(), "\U0001F642") << "the last value";
  const std::vector<Json>& b = json.find("b")->array();
  EXPECT_TRUE(std::isnan(b[0].number()));
  EXPECT_EQ(b[1].number(), -std::numeric_limits<double>::infinity());
  EXPECT_EQ(b[2].number(), std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::signbit(b[3].number()));
  EXPECT_EQ(Json::parse_python("1e-999", "f").number(), 0);
  EXPECT_EQ(Json::parse_python("0." + std::string(400, '0') + "1e800", "f").number(),
            std::numeric_limits<double>::infinity());
  EXPECT_EQ(Json::parse_python(std::string(4300, '9'), "f").kind(), Json::Kind::kBigInt);
  EXPECT_EQ(JsonCursor(json.object()[0].second, "f").path(), "");
}

TEST(Json, ExactReaderIsStrictButKeepsIntegers) {
  const Json json =
      Json::parse_exact(R"({"b": 123456789012345678901234567890, "a": [1, -2.5e3, "\u00e9", null]})", "f");
  EXPECT_EQ(json.find("b")->big_integer(), "123456789012345678901234567890");
  EXPECT_EQ(json.find("a")->array()[1].number(), -2500);
  EXPECT_EQ(json.find("a")->array()[2].string(), "\u00e9");
  for (const char* text : {"", "NaN", "-Infinity", "[Infinity]", R"({"a":1,"a":1})", "1e400", "[1,]", "01", "1 2",
                           "'a'", "\"\\ud800\"", "\"\xff\"", "\xEF\xBB\xBF{}"}) {
    EXPECT_THROW(Json::parse_exact(text, "f"), Error) << text;
  }
  EXPECT_NO_THROW(Json::parse_exact(std::string(64, '[') + std::string(64, ']'), "f"));
  EXPECT_THROW(Json::parse_exact(std::string(65, '[') + std::string(65, ']'), "f"), Error);
  EXPECT_NO_THROW(Json::parse_exact("[1,2,3]", "f", 4));
  std::string keys = "{\"0\":0";
  for (size_t i = 1; i < Json::kMaxKeys; ++i) keys += ",\"" + std::to_string(i) + "\":0";
  EXPECT_EQ(Json::parse_exact(keys + "}", "f").object().size(), Json::kMaxKeys);
  EXPECT_THROW(Json::parse_exact(keys + ",\"a\":0}", "f"), Error);
  EXPECT_NO_THROW(Json::parse_exact("[" + keys + "}," + keys + "}]", "f"));
  EXPECT_NO_THROW(Json::parse_python(keys + ",\"a\":0}", "f"));
  EXPECT_THROW(Json::parse_exact("[1,2,3]", "f", 3), Error);
}

TEST(Json, CursorErrorsCarryTheirPath) {
  const Json json = Json::parse_exact(R"({"a": {"b": [1, "x"]}})", "f");
  try {
    JsonCursor(json, "f").at("a").at("b").elements()[1].boolean();
    FAIL();
  } catch (const JsonFieldError& error) {
    EXPECT_EQ(error.path(), "a.b[1]");
    EXPECT_EQ(std::string(error.what()), "f: field a.b[1]: expected true or false, found \"x\"");
  }
}

TEST(Json, PythonReaderNamesThePlace) {
  const auto message = [](const std::string& text) -> std::string {
    try {
      Json::parse_python(text, "request");
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDataLoss);
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message("{\"a\": [1, {\"b\": tru}]}"),
            "request: field a[1].b, byte 16: expected a JSON value, found \"tru}]}\"");
  EXPECT_EQ(message("[\"\xc3\"]"), "request: field [0], byte 2: expected a string in UTF-8, found \"\\xc3\"]\"");
  EXPECT_EQ(message("1 2"), "request: byte 2: expected the end of the text, found \"2\"");
  for (const std::string text : {"",
                                 " ",
                                 "{",
                                 "[",
                                 "\"",
                                 "\"\\",
                                 "\"\\u12",
                                 "{\"a\":1,}",
                                 "[1,]",
                                 "[1 2]",
                                 "'a'",
                                 "+1",
                                 "-",
                                 "1.",
                                 ".5",
                                 "1e",
                                 "1e+",
                                 "01",
                                 "-01",
                                 "\"\\ud800\"",
                                 "\"\\udc00\"",
                                 "\"\\ud800\\u0041\"",
                                 "\"a\nb\"",
                                 "\xef\xbb\xbf{}",
                                 "{1:2}",
                                 "nan",
                                 "{\"a\" 1}",
                                 "\"\\x\"",
                                 "\xff",
                                 "infinity"}) {
    EXPECT_NE(message(text), "") << text;
  }
  EXPECT_NE(message(std::string(4301, '9')), "");
  EXPECT_EQ(message(std::string(512, '[') + std::string(512, ']')), "");
  EXPECT_NE(message(std::string(513, '[') + std::string(513, ']')).find("512 levels"), std::string::npos);
  EXPECT_NE(message(std::string(1 << 20, '[')), "");
}

TEST(Json, CursorsNameTheField) {
  const Json json = Json::parse(R"({"a": {"b": [1, "x"]}, "f": 3.0, "n": null})", "f");
  const JsonCursor root(json, "config.json");
  EXPECT_EQ(root.at("f").integer(0, 10), 3);
  EXPECT_FALSE(root.find("n").has_value());
  const auto message = [&](auto&& read) -> std::string {
    try {
      read();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message([&] { root.at("a").at("b").elements()[1].integer(0, 9); }),
            "config.json: field a.b[1]: expected an integer from 0 to 9, found \"x\"");
  EXPECT_EQ(message([&] { root.at("a").at("c"); }), "config.json: field a.c: expected a value, found nothing");
  EXPECT_EQ(message([&] { root.at("f").integer(4, 9); }),
            "config.json: field f: expected an integer from 4 to 9, found 3");
  EXPECT_NE(message([&] { root.at("f").number(0, 1); }), "");
  EXPECT_NE(message([&] { root.at("a").boolean(); }), "");
  EXPECT_NE(message([&] { root.at("a").string(); }), "");
}

}  // namespace
}  // namespace tessera
