// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bars for people: in a line of text, and in a picture that any browser shows.
#include <string>
#include <string_view>

namespace tessera {

// `share` (of the longest bar, 1) of `width` characters '#': at least one above 0, at most `width`; none for NaN.
std::string text_bar(double share, int width = 40);

// An SVG drawing on white, built from top to bottom. Lengths are in pixels; text is escaped.
class SvgPage {
 public:
  explicit SvgPage(int width) : width_(width) {}
  // `bold`, if any, comes before `content` on the same line. (x, y) is where the line of letters begins.
  void text(int x, int y, std::string_view content, std::string_view bold = {});
  void note(int x, int y, std::string_view content);  // in grey
  // `title` is shown where the pointer rests; empty: none.
  void bar(double x, double y, double width, double height, std::string_view colour, std::string_view title = {});
  void line(int x1, int y1, int x2, int y2);
  // The whole file.
  std::string finish(int height) const;

 private:
  int width_;
  std::string body_;
};

}  // namespace tessera
