// SPDX-License-Identifier: Apache-2.0
#include "base/plot.h"

#include <fmt/format.h>

#include <algorithm>

namespace tessera {

namespace {

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

}  // namespace

std::string text_bar(double share, int width) {
  if (!(share > 0)) return "";
  const int length = static_cast<int>(std::min(share, 1.0) * width + 0.5);
  return std::string(static_cast<size_t>(std::max(1, length)), '#');
}

void SvgPage::text(int x, int y, std::string_view content, std::string_view bold) {
  const std::string head = bold.empty() ? "" : fmt::format("<tspan font-weight=\"bold\">{}</tspan> ", escaped(bold));
  body_ += fmt::format("<text x=\"{}\" y=\"{}\">{}{}</text>\n", x, y, head, escaped(content));
}

void SvgPage::note(int x, int y, std::string_view content) {
  body_ += fmt::format("<text x=\"{}\" y=\"{}\" fill=\"#666\">{}</text>\n", x, y, escaped(content));
}

void SvgPage::bar(double x, double y, double width, double height, std::string_view colour, std::string_view title) {
  body_ += fmt::format("<rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\" fill=\"{}\"", x, y, width,
                       height, colour);
  body_ += title.empty() ? "/>\n" : fmt::format("><title>{}</title></rect>\n", escaped(title));
}

void SvgPage::line(int x1, int y1, int x2, int y2) {
  body_ += fmt::format("<line x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\" stroke=\"#888\"/>\n", x1, y1, x2, y2);
}

std::string SvgPage::finish(int height) const {
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" "
      "font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"{0}\" height=\"{1}\" fill=\"#fff\"/>\n{2}</svg>\n",
      width_, height, body_);
}

}  // namespace tessera
