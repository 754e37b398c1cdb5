// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "base/plot.h"
#include "bench/e2e/bench_model.h"

namespace tessera::bench {

namespace {

constexpr int kLeft = 20, kBars = 260, kFull = 520, kStep = 15;
constexpr const char* kReadColour = "#35638f";
constexpr const char* kPrefillColour = "#b5533c";

double median(const std::vector<double>& values) {
  return Samples{values}.quantile(0.5);
}

// A bar of `share` of the full width with `value` behind it.
void bar(SvgPage& page, int& y, const std::string& name, double share, const char* colour, const std::string& value,
         const std::string& title) {
  const double width = std::clamp(share, 0.0, 1.25) * kFull;
  page.text(kLeft, y + 10, name);
  page.bar(kBars, y, width, kStep - 4, colour, title);
  page.text(kBars + 6 + static_cast<int>(width), y + 10, value);
  y += kStep;
}

// Rates of one kind at every context; the longest bar is the fastest median.
void rates(SvgPage& page, int& y, const char* kind, const char* colour, const std::vector<ModelRow>& rows,
           std::vector<double> ModelRow::*samples) {
  double most = 0;
  for (const ModelRow& row : rows) most = std::max(most, median(row.*samples));
  for (const ModelRow& row : rows) {
    const auto [slowest, fastest] = std::minmax_element((row.*samples).begin(), (row.*samples).end());
    const double rate = median(row.*samples);
    const std::string note = row.filled > 0 ? fmt::format("; {} tokens' cache entries are random", row.filled) : "";
    bar(page, y, fmt::format("{}, context {}", kind, row.context), most > 0 ? rate / most : 0, colour,
        fmt::format("{:.1f} tokens/s", rate),
        fmt::format("{} runs, {:.1f} to {:.1f} tokens/s{}", (row.*samples).size(), *slowest, *fastest, note));
  }
  y += kStep / 2;
}

}  // namespace

std::string model_svg(const ModelReport& report, const std::string& model, const std::string& machine) {
  SvgPage page(1000);
  int y = 18;
  page.text(kLeft, y, fmt::format("{}; {}", model, machine), "tessera bench model");
  y += 2 * kStep;
  rates(page, y, "prefill", kPrefillColour, report.rows, &ModelRow::prefill_tokens_per_second);
  rates(page, y, "decode", kReadColour, report.rows, &ModelRow::decode_tokens_per_second);
  page.note(kLeft, y + 6, "Medians; each kind's longest bar is its fastest context.");
  y += 2 * kStep;
  const SyntheticModel& made = report.synthetic;
  if (made.layers.empty()) return page.finish(y);
  page.text(kLeft, y,
            fmt::format("{} of {} layers, read {:.1f} GB/s with all threads, {:.1f} with one", made.num_layers,
                        made.all_layers, made.ceilings.read_gbs.best, made.ceilings.read_one_gbs.best),
            "one token in a layer");
  y += kStep;
  const int top = y;
  for (const LayerRow& row : made.layers) {
    const double share = row.share_of_read();
    bar(page, y, row.description(), share, kReadColour,
        fmt::format("{:.0f} %, {:.1f} us", share * 100, row.time.quantile(0.5) * 1e6),
        fmt::format("{} bytes", row.bytes));
  }
  page.line(kBars + kFull, top - 4, kBars + kFull, y);
  page.note(kLeft, y + 10, "Share of reading as many bytes with all threads in the same run. The line is 100 %.");
  return page.finish(y + 2 * kStep);
}

}  // namespace tessera::bench
