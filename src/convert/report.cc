// SPDX-License-Identifier: Apache-2.0
#include "convert/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/plot.h"
#include "convert/statistics_json.h"
#include "numeric/e4m3.h"

namespace tessera::convert {

namespace {

double share(int64_t part, int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0;
}

// Shares are shown so that a small one doesn't look like none.
std::string percent(double value) {
  if (value > 0 && value < 0.00005) return "<0.01 %";
  return fmt::format("{:.2f} %", value * 100);
}

std::string count(int64_t value) {
  const double v = static_cast<double>(value);
  if (v >= 1e9) return fmt::format("{:.2f} G", v / 1e9);
  if (v >= 1e6) return fmt::format("{:.2f} M", v / 1e6);
  if (v >= 1e4) return fmt::format("{:.1f} k", v / 1e3);
  return fmt::format("{}", value);
}

// A bar that is full where value == most.
std::string bar(double value, double most) {
  return most > 0 ? text_bar(value / most) : "";
}

std::string name_of(size_t family) {
  return std::string(to_string(static_cast<Family>(family)));
}

std::string what_happened(const Statistics& s) {
  std::string out;
  const auto add = [&](int64_t number, const char* what) {
    if (number > 0) out += fmt::format("{}{} {}", out.empty() ? "" : ", ", number, what);
  };
  add(s.num_rounded, "rounded");
  add(s.num_exact, s.num_inexact_blocks > 0 ? "from MXFP4" : "from MXFP4 exactly");
  add(s.num_nvfp4, "NVFP4 already");
  add(s.num_kept, "kept in their format");
  return out;
}

// Scale bytes by power of two: eight bytes each, the first the subnormal ones.
std::string histogram_text(const Statistics& s) {
  constexpr size_t kPerPower = 8;
  std::string out;
  int64_t most = 0;
  std::array<int64_t, 16> powers{};
  for (size_t i = 0; i < s.scales.size(); ++i) powers[i / kPerPower] += s.scales[i];
  size_t first = powers.size(), last = 0;
  for (size_t p = 0; p < powers.size(); ++p) {
    most = std::max(most, powers[p]);
    if (powers[p] > 0) first = std::min(first, p), last = p;
  }
  for (size_t p = last + 1; p-- > first;) {
    const float low = numeric::kE4m3Values[p * kPerPower],
                high = numeric::kE4m3Values[std::min<size_t>(p * 8 + 7, 126)];
    out += fmt::format("  {:>9.4g} .. {:<9.4g} {:>8}  {}\n", low, high, percent(share(powers[p], s.num_blocks)),
                       bar(static_cast<double>(powers[p]), static_cast<double>(most)));
  }
  return out;
}

}  // namespace

std::string report_text(const FamilyStatistics& families) {
  std::string out = "family      values    error      saturated  zero       with UE8M0 scales\n";
  double worst = 0;
  for (const Statistics& s : families) worst = std::max({worst, s.relative_error(), s.relative_error_e8m0()});
  for (size_t f = 0; f < kNumFamilies; ++f) {
    const Statistics& s = families[f];
    if (s.num_values == 0) {
      if (s.num_kept > 0) out += fmt::format("{:<11} {} matrices kept in their format\n", name_of(f), s.num_kept);
      continue;
    }
    out += fmt::format("{:<11} {:<9} {:<10} {:<10} {:<10} {}\n", name_of(f), count(s.num_values),
                       percent(s.relative_error()), percent(share(s.num_saturated, s.num_rounded_blocks)),
                       percent(share(s.num_zero, s.num_blocks)), percent(s.relative_error_e8m0()));
  }
  for (size_t f = 0; f < kNumFamilies; ++f) {
    const Statistics& s = families[f];
    if (s.num_values == 0) continue;
    out += fmt::format("\n{}: {}; {} blocks of 16\n", name_of(f), what_happened(s), count(s.num_blocks));
    out +=
        fmt::format("  error  E4M3 scales   {:>8}  {}\n", percent(s.relative_error()), bar(s.relative_error(), worst));
    out += fmt::format("         UE8M0 scales  {:>8}  {}\n", percent(s.relative_error_e8m0()),
                       bar(s.relative_error_e8m0(), worst));
    if (s.num_vanished > 0) out += fmt::format("  {} blocks of small values became zero\n", count(s.num_vanished));
    if (s.num_inexact_blocks > 0) out += fmt::format("  {} MXFP4 blocks were rounded\n", count(s.num_inexact_blocks));
    out += "  block scales (E4M3), share of blocks\n" + histogram_text(s);
  }
  return out;
}

std::string report_json(const FamilyStatistics& families) {
  nlohmann::ordered_json out = nlohmann::ordered_json::object();
  for (size_t f = 0; f < kNumFamilies; ++f) {
    const Statistics& s = families[f];
    nlohmann::ordered_json family = {{"relative_error", s.relative_error()},
                                     {"relative_error_with_ue8m0_scales", s.relative_error_e8m0()},
                                     {"saturated_share", share(s.num_saturated, s.num_rounded_blocks)},
                                     {"zero_share", share(s.num_zero, s.num_blocks)}};
    family.update(to_json(s));
    out[name_of(f)] = std::move(family);
  }
  return nlohmann::ordered_json{{"families", std::move(out)}}.dump(1) + "\n";
}

std::string report_svg(const FamilyStatistics& families) {
  constexpr int kWidth = 720, kPanel = 190, kLeft = 40, kPlot = 640, kHeight = 90;
  SvgPage page(kWidth);
  int top = 20;
  double worst = 0;
  for (const Statistics& s : families) worst = std::max({worst, s.relative_error(), s.relative_error_e8m0()});
  for (size_t f = 0; f < kNumFamilies; ++f) {
    const Statistics& s = families[f];
    if (s.num_values == 0) continue;
    page.text(kLeft, top, fmt::format("{} values, {}", count(s.num_values), what_happened(s)), name_of(f));
    const auto error_bar = [&](int y, const char* label, double error, const char* colour) {
      const double length = worst > 0 ? error / worst * 300 : 0;
      page.text(kLeft, y + 9, label);
      page.bar(150, y, length, 11, colour);
      page.text(158 + static_cast<int>(length), y + 9, percent(error));
    };
    error_bar(top + 8, "error, E4M3", s.relative_error(), "#2a7f62");
    error_bar(top + 24, "error, UE8M0", s.relative_error_e8m0(), "#b5533c");
    const int64_t most = *std::max_element(s.scales.begin(), s.scales.end());
    const int base = top + 44 + kHeight;
    for (size_t byte = 0; byte < 127; ++byte) {
      if (s.scales[byte] == 0) continue;
      const double height = std::max(0.5, share(s.scales[byte], most) * kHeight);
      page.bar(kLeft + static_cast<int>(byte) * kPlot / 128, base - height, 4, height, "#35638f",
               fmt::format("scale {:g}: {} blocks", static_cast<double>(numeric::kE4m3Values[byte]), s.scales[byte]));
    }
    page.line(kLeft, base, kLeft + kPlot, base);
    for (int power = -6; power <= 8; power += 2) {
      page.text(kLeft + (power + 7) * 8 * kPlot / 128, base + 13, fmt::format("2^{}", power));
    }
    top += kPanel;
  }
  page.note(kLeft, top,
            "Blocks of 16 by block scale (E4M3), relative error of the values, and what it would be with power-of-two "
            "scales (UE8M0)");
  return page.finish(top + 12);
}

}  // namespace tessera::convert
