// SPDX-License-Identifier: Apache-2.0
// JSON that goes out, against another implementation's reader and writer.
#include "server/json_text.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "testing/seed.h"

namespace tessera::server {
namespace {

using nlohmann::ordered_json;

std::string random_string(std::mt19937_64& random) {
  static const char* const kPieces[] = {"a",        "\"",     "\\",     "/",          "\n",
                                        "\r\t\b\f", "\u00e9", "\u4e16", "\U0001F600", "\x7f"};
  std::string out;
  for (uint64_t i = random() % 12; i > 0; --i) {
    if (random() % 4 == 0) {
      out += static_cast<char>(random() % 0x20);  // zero too
    } else {
      out += kPieces[random() % std::size(kPieces)];
    }
  }
  return out;
}

TEST(JsonText, ValuesAreWrittenAsOthersWriteThem) {
  std::mt19937_64 random(fresh_seed());
  for (int i = 0; i < 2000; ++i) {
    const std::string text = random_string(random);
    EXPECT_EQ(JsonText(text).text(), ordered_json(text).dump());
    const auto number = static_cast<int64_t>(random());
    EXPECT_EQ(JsonText(number).text(), ordered_json(number).dump());
    EXPECT_EQ(JsonText(static_cast<uint64_t>(number)).text(), ordered_json(static_cast<uint64_t>(number)).dump());
  }
  EXPECT_EQ(JsonText().text(), "null");
  EXPECT_EQ(JsonText(nullptr).text(), "null");
  EXPECT_EQ(JsonText(true).text(), "true");
  EXPECT_EQ(JsonText(false).text(), "false");
  EXPECT_EQ(JsonText(static_cast<unsigned char>(200)).text(), "200");
  EXPECT_EQ(JsonText(std::numeric_limits<int64_t>::min()).text(), "-9223372036854775808");
  EXPECT_EQ(JsonText("").text(), "\"\"");
  EXPECT_EQ(JsonText::or_null("").text(), "null");
  EXPECT_EQ(JsonText::or_null("a").text(), "\"a\"");
}

TEST(JsonText, DoublesComeBackAsTheyWereAndAreNoIntegers) {
  std::mt19937_64 random(fresh_seed());
  const auto check = [](double value) {
    const ordered_json read = ordered_json::parse(JsonText(value).text());
    ASSERT_TRUE(read.is_number_float()) << JsonText(value).text();
    EXPECT_EQ(std::bit_cast<uint64_t>(read.get<double>()), std::bit_cast<uint64_t>(value)) << JsonText(value).text();
  };
  for (const double value : {0.0, -0.0, 1.0, -9999.0, 0.1, 1e15, 1e16, 1e17, 1e20, 1e300, 5e-324, 1.0 / 3})
    check(value);
  for (int i = 0; i < 20000; ++i) {
    const double value = std::bit_cast<double>(random());
    if (std::isfinite(value)) check(value);
    check(static_cast<double>(static_cast<int64_t>(random()) >> (random() % 64)));
  }
  for (const double value : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(JsonText(value).text(), "null");
    EXPECT_EQ(JsonText(-value).text(), "null");
  }
}

TEST(JsonText, WhatIsNotUtf8IsReplaced) {
  EXPECT_EQ(JsonText("a\xff\"\xc3").text(), "\"a\uFFFD\\\"\uFFFD\"");
  std::mt19937_64 random(fresh_seed());
  for (int i = 0; i < 2000; ++i) {
    std::string bytes = random_string(random);
    for (uint64_t j = random() % 4; j > 0; --j)
      bytes.insert(random() % (bytes.size() + 1), 1, static_cast<char>(random()));
    const std::string text = JsonObject{{bytes, bytes}}.text();
    const ordered_json read = ordered_json::parse(text, nullptr, false);
    ASSERT_FALSE(read.is_discarded()) << text;
    EXPECT_EQ(read.begin().key(), read.begin().value().get<std::string>());
  }
}

TEST(JsonText, ObjectsAndArraysKeepTheirOrder) {
  JsonArray list{1, "two", nullptr, 4.0, true};
  EXPECT_EQ(list.size(), 5u);
  list.add(JsonArray()).add(JsonObject());
  EXPECT_EQ(list.text(), R"([1,"two",null,4.0,true,[],{}])");
  JsonObject object{{"b", list}, {"a\"", JsonText::raw("12345678901234567890123")}};
  EXPECT_FALSE(object.is_empty());
  EXPECT_EQ(object.text(), R"({"b":[1,"two",null,4.0,true,[],{}],"a\"":12345678901234567890123})");
  EXPECT_TRUE(JsonObject().is_empty());
  EXPECT_EQ(JsonObject().text(), "{}");
  EXPECT_EQ(JsonArray().text(), "[]");
}

TEST(JsonText, MembersOfAnotherTextFollow) {
  for (const char* const none : {"{}", "{ }", " {\n} "}) {
    EXPECT_EQ(JsonObject().add_members_of(none).text(), "{}");
    EXPECT_EQ(JsonObject({{"a", 1}}).add_members_of(none).text(), R"({"a":1})");
  }
  EXPECT_EQ(JsonObject().add_members_of(R"({"x":{"y":[]}})").add("z", 2).text(), R"({"x":{"y":[]},"z":2})");
  EXPECT_EQ(JsonObject({{"a", 1}}).add_members_of(R"( {"x":"}"} )").text(), R"({"a":1,"x":"}"})");
}

}  // namespace
}  // namespace tessera::server
