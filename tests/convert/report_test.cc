// SPDX-License-Identifier: Apache-2.0
#include "convert/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "convert/statistics_json.h"
#include "testing/op_harness.h"

namespace tessera::convert {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class Report : public testing::RandomTest {
 protected:
  Statistics random_statistics() {
    Statistics s;
    s.num_rounded = 3;
    s.num_blocks = 0;
    for (size_t i = 0; i < 127; ++i) s.num_blocks += s.scales[i] = static_cast<int64_t>(rng_.below(1000));
    s.num_values = 16 * s.num_blocks;
    s.num_saturated = s.num_blocks / 2;
    s.num_zero = 1;
    s.squared_value = 1 + rng_.uniform();
    s.squared_error = 0.01 * s.squared_value;
    s.squared_value_e8m0 = s.squared_value;
    s.squared_error_e8m0 = 0.0144 * s.squared_value;
    return s;
  }
};

TEST_F(Report, StatisticsComeBackFromJson) {
  const Statistics before = random_statistics();
  const std::string text = to_json(before).dump();
  const Json json = Json::parse(text, "x");
  const Statistics after = statistics_from_json(JsonCursor(json, "x"));
  EXPECT_EQ(to_json(after).dump(), text);
  EXPECT_EQ(after.squared_value, before.squared_value);
  const Json broken = Json::parse(R"({"matrices_rounded": -1})", "x");
  EXPECT_THROW(statistics_from_json(JsonCursor(broken, "x")), Error);
}

TEST_F(Report, TextShowsFamiliesAndScales) {
  FamilyStatistics families{};
  families[0] = random_statistics();
  families[2].num_kept = 7;
  const std::string text = report_text(families);
  EXPECT_THAT(text, HasSubstr("10.00 %"));
  EXPECT_THAT(text, HasSubstr("12.00 %"));
  EXPECT_THAT(text, HasSubstr("<0.01 %"));
  EXPECT_THAT(text, HasSubstr("attention   7 matrices kept in their format"));
  EXPECT_THAT(text, HasSubstr("256 .. 448"));
  EXPECT_THAT(text, Not(HasSubstr("head")));
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 100u) << line;
}

TEST_F(Report, JsonAndSvg) {
  FamilyStatistics families{};
  families[0] = random_statistics();
  families[5] = random_statistics();
  const auto json = nlohmann::json::parse(report_json(families));
  EXPECT_NEAR(json["families"]["experts"]["relative_error"].get<double>(), 0.1, 1e-12);
  EXPECT_NEAR(json["families"]["head"]["relative_error_with_ue8m0_scales"].get<double>(), 0.12, 1e-12);
  EXPECT_EQ(json["families"]["experts"]["blocks_by_scale_byte"][3], families[0].scales[3]);
  const std::string svg = report_svg(families);
  EXPECT_TRUE(svg.starts_with("<svg xmlns="));
  size_t num_bars = 0, num_expected = 0;
  for (size_t at = svg.find("<title>"); at != std::string::npos; at = svg.find("<title>", at + 1)) ++num_bars;
  for (const size_t f : {0, 5}) {
    for (const int64_t blocks : families[f].scales) num_expected += blocks > 0 ? 1 : 0;
  }
  EXPECT_EQ(num_bars, num_expected);
  // Every element is closed.
  const auto count = [&](const std::string& what) {
    size_t number = 0;
    for (size_t at = svg.find(what); at != std::string::npos; at = svg.find(what, at + 1)) ++number;
    return number;
  };
  EXPECT_EQ(count("<text"), count("</text>"));
  EXPECT_EQ(count("<rect"), count("</rect>") + count("fill=\"#2a7f62\"/>") + count("fill=\"#b5533c\"/>") + 1);
}

// No division by nothing.
TEST(EmptyReport, HasNoNumbersButZeros) {
  const FamilyStatistics none{};
  for (const std::string& text : {report_text(none), report_json(none), report_svg(none)}) {
    EXPECT_THAT(text, Not(HasSubstr("nan")));
    EXPECT_THAT(text, Not(HasSubstr("inf")));
  }
}

}  // namespace
}  // namespace tessera::convert
