// SPDX-License-Identifier: Apache-2.0
#include "text/grammar/pattern.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "base/error.h"
#include "text/grammar/code_points.h"

namespace tessera::text {
namespace {

using ::testing::HasSubstr;

std::string fault(const std::string& pattern, PatternUse use = PatternUse::kAnswer) {
  return find_pattern_fault(pattern, use).value_or("");
}

TEST(CodePoints, AreSetsOfRanges) {
  CodePoints set = {{'a', 'c'}, {'x', 'z'}};
  set.add({'d', 'e'});
  ASSERT_EQ(set.ranges().size(), 2u);
  EXPECT_EQ(set.ranges()[0], CodePoints::Range('a', 'e'));
  set.add({'b', 'y'});
  ASSERT_EQ(set.ranges().size(), 1u);
  EXPECT_EQ(set.others().others().ranges()[0], CodePoints::Range('a', 'z'));
  EXPECT_EQ(set.without({{'a', 'y'}}).ranges()[0], CodePoints::Range('z', 'z'));
  EXPECT_TRUE(set.without({{0, CodePoints::kLast}}).is_empty());
  EXPECT_EQ(CodePoints().others().ranges()[0], CodePoints::Range(0, CodePoints::kLast));
}

TEST(RegularExpression, IsSaidInEscapesGroupsAndRepetitions) {
  const auto canonical = [](const std::string& pattern) { return canonical_pattern(pattern, PatternUse::kAnswer); };
  EXPECT_EQ(canonical("^ab$"), "\\u{61}\\u{62}");
  EXPECT_EQ(canonical("(?<n>a|b)+?c{2,}"), "(\\u{61}|\\u{62})+\\u{63}{2,}");
  EXPECT_EQ(canonical("[b-da-c\\d]"), "[\\u{30}-\\u{39}\\u{61}-\\u{64}]");
  EXPECT_EQ(canonical("(a|)(|)b{0}"), "((\\u{61})?)");
  EXPECT_EQ(canonical("\\x41a\\u0042\\u{1F600}\\ud83d\\ude00"), "\\u{41}\\u{61}\\u{42}\\u{1f600}\\u{1f600}");
  EXPECT_EQ(canonical("[\\^]"), "\\u{5e}");
  EXPECT_EQ(canonical("{\"a\": 1}"), "\\u{7b}\\u{22}\\u{61}\\u{22}\\u{3a}\\u{20}\\u{31}\\u{7d}");
  EXPECT_EQ(canonical("^$"), "");
}

TEST(RegularExpression, JsonStringsHaveEscapes) {
  const auto canonical = [](const std::string& pattern) { return canonical_pattern(pattern, PatternUse::kJsonString); };
  EXPECT_EQ(canonical("\\n"), "(\\u{5c}\\u{6e})");
  EXPECT_EQ(canonical("[\"a]"), "\\u{61}");
  EXPECT_EQ(canonical("[\"\\\\]"), "(\\u{5c}\\u{22}|\\u{5c}\\u{5c})");
  EXPECT_THAT(fault("a\"b", PatternUse::kArgument), HasSubstr("byte 2: expected a character that can stand here"));
  EXPECT_EQ(fault("[^\"]", PatternUse::kArgument), "");
}

TEST(RegularExpression, WhatIsReadDifferentlyOrNotHeldIsRefusedWithItsPlace) {
  for (const char* pattern : {"(?=a)b",
                              "(?<!a)b",
                              "(?i)a",
                              "\\bword",
                              "(a)\\1",
                              "\\p{L}",
                              "\\Aa\\Z",
                              "a{,2}",
                              "a{3,2}",
                              "a**",
                              "a++",
                              "*a",
                              "{2}",
                              "(a",
                              "a)",
                              "[a",
                              "[]a]",
                              "[z-a]",
                              "[\\w-x]",
                              "[a-\\d]",
                              "(^a|b)",
                              "a^b",
                              "a$b",
                              "\\",
                              "\\x4",
                              "\\u12",
                              "\\u{110000}",
                              "\\u{}",
                              "\\ud83d\\u0041",
                              "\\x00",
                              "[^\\D\\d]",
                              "(?P<a",
                              "\\e"}) {
    EXPECT_THAT(fault(pattern), HasSubstr("regular expression, byte ")) << pattern;
  }
  EXPECT_THAT(fault(std::string(5000, '(')), HasSubstr("groups at most 100 deep"));
  EXPECT_THAT(fault(std::string(5000, 'a')), HasSubstr("at most 4096 characters"));
  EXPECT_EQ(fault("ab]}{,x"), "");
}

TEST(RegularExpression, RepetitionsAreCounted) {
  EXPECT_TRUE(find_pattern_excess("((a{1,30}b){1,30}){10}"));
  EXPECT_TRUE(find_pattern_excess("a{99999999999999999999}"));
  EXPECT_TRUE(find_pattern_excess("([a-z]{50}){100}"));
  EXPECT_FALSE(find_pattern_excess("\\u{10000}\\u{"));
  EXPECT_FALSE(find_pattern_excess("[0-9]{4}-[{}]+(x|y){3,}\\{5000}"));
}

}  // namespace
}  // namespace tessera::text
