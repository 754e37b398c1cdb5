// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>

#include "base/integer_math.h"
#include "base/plot.h"
#include "base/rng.h"
#include "base/strings.h"

namespace tessera {
namespace {

TEST(Strings, PrintableIsOneSafeLine) {
  EXPECT_EQ(printable("a\nb\x1b[0m"), "a\\x0ab\\x1b[0m");
  EXPECT_EQ(printable("\u00e9\xff\xc3"), "\u00e9\\xff\\xc3");
  EXPECT_EQ(printable("\xc2\x85"), "\\xc2\\x85") << "C1 controls too";
  EXPECT_EQ(printable(std::string(1000, 'x'), 10), "xxxxxxxxxx...");
}

TEST(Strings, SplitKeepsEmptyParts) {
  using Parts = std::vector<std::string_view>;
  EXPECT_EQ(split("", ','), Parts({""}));
  EXPECT_EQ(split("a", ','), Parts({"a"}));
  EXPECT_EQ(split(",a,,b,", ','), Parts({"", "a", "", "b", ""}));
}

TEST(IntegerMath, RoundsUp) {
  EXPECT_EQ(ceil_div(0, 16), 0);
  EXPECT_EQ(ceil_div(1, 16), 1);
  EXPECT_EQ(ceil_div<int64_t>(16, 16), 1);
  EXPECT_EQ(ceil_div<size_t>(17, 16), 2u);
  EXPECT_EQ(round_up(17, 16), 32);
  EXPECT_EQ(round_up<int64_t>(32, 16), 32);
}

TEST(Strings, Utf8) {
  EXPECT_EQ(complete_utf8_prefix("ab\xe4\xb8"), 2u);
  EXPECT_EQ(complete_utf8_prefix("ab\xf0\x9f\x99"), 2u);
  EXPECT_EQ(complete_utf8_prefix("ab\xf0\x9f\x99\x82"), 6u);
  EXPECT_EQ(complete_utf8_prefix("a\xff"), 2u) << "can never become valid";
  EXPECT_EQ(complete_utf8_prefix("\xed\xa0"), 2u) << "a surrogate never becomes valid";
  EXPECT_EQ(complete_utf8_prefix("\x80\x80\x80\x80"), 4u);
  EXPECT_EQ(replace_invalid_utf8("a\xe4\xb8z\xff"), "a\uFFFDz\uFFFD") << "one mark per maximal part";
  EXPECT_TRUE(is_valid_utf8("\u4f60\U0001F642"));
  for (const char* bad : {"\xc0\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe4\xb8", "\x80"})
    EXPECT_FALSE(is_valid_utf8(bad));
  // Every scalar value there and back.
  for (char32_t c = 0; c < 0x110000; c += 7) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string text;
    append_utf8(text, c);
    size_t pos = 0;
    ASSERT_EQ(next_code_point(text, pos), c);
    ASSERT_EQ(pos, text.size());
  }
}

TEST(Strings, Bytes) {
  EXPECT_EQ(format_bytes(17), "17 B");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_bytes(uint64_t{3} << 40), "3.00 TiB");
}

// Known answers of Random123's kat_vectors for philox4x32-10.
TEST(Rng, PhiloxKnownAnswers) {
  EXPECT_EQ(philox(0, 0, 0), (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox(~uint64_t{0}, ~uint64_t{0}, ~uint64_t{0}),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e),
            (std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Rng, Distributions) {
  Rng rng(1);
  double sum = 0, squares = 0;
  for (int i = 0; i < 100000; ++i) {
    const float u = rng.uniform();
    ASSERT_TRUE(u >= 0 && u < 1);
    ASSERT_LT(rng.below(7), 7u);
    const double n = static_cast<double>(rng.normal());
    ASSERT_TRUE(std::isfinite(n));
    sum += n, squares += n * n;
  }
  EXPECT_NEAR(sum / 100000, 0, 0.02);
  EXPECT_NEAR(squares / 100000, 1, 0.03);
}

TEST(Plot, BarsAreAsLongAsTheirShare) {
  EXPECT_EQ(text_bar(0.5, 10), "#####");
  EXPECT_EQ(text_bar(1e-9, 10), "#") << "something is not nothing";
  EXPECT_EQ(text_bar(7, 10), "##########");
  for (const double none : {0.0, -1.0, std::nan("")}) EXPECT_EQ(text_bar(none, 10), "");
}

TEST(Plot, SvgEscapesAndCloses) {
  SvgPage page(100);
  page.text(1, 2, "a < b & \"c\"", "bold>");
  page.bar(0, 0, 12.345, 6, "#fff", "t<");
  page.bar(0, 0, 1, 1, "#000");
  const std::string svg = page.finish(50);
  EXPECT_TRUE(svg.starts_with("<svg xmlns=")) << svg;
  EXPECT_TRUE(svg.ends_with("</svg>\n")) << svg;
  EXPECT_NE(svg.find("<tspan font-weight=\"bold\">bold&gt;</tspan> a &lt; b &amp; &quot;c&quot;</text>"),
            std::string::npos)
      << svg;
  EXPECT_NE(svg.find("width=\"12.35\" height=\"6.00\" fill=\"#fff\"><title>t&lt;</title></rect>"), std::string::npos)
      << svg;
  EXPECT_NE(svg.find("fill=\"#000\"/>"), std::string::npos) << svg;
}

}  // namespace
}  // namespace tessera
