// SPDX-License-Identifier: Apache-2.0
#include "bench/serve/load_report.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/plot.h"
#include "base/strings.h"

namespace tessera::bench {

namespace {

constexpr size_t kErrorBytes = 160;
constexpr int kLeft = 20, kBars = 200, kFull = 560, kStep = 15;
constexpr const char* kRateColour = "#35638f";
constexpr const char* kMedianColour = "#b5533c";
constexpr const char* kTailColour = "#e3b5a8";

std::string triple(const Samples& samples) {
  if (samples.seconds.empty()) return fmt::format("{:>8} {:>8} {:>8}", "-", "-", "-");
  return fmt::format("{:>8.1f} {:>8.1f} {:>8.1f}", samples.quantile(0.5) * 1e3, samples.quantile(0.9) * 1e3,
                     samples.quantile(0.99) * 1e3);
}

// For each point a bar to p99 and one to the median over it; the longest p99 fills the width.
void times(SvgPage& page, int& y, const char* title, const std::vector<LoadSummary>& points,
           Samples LoadSummary::*member) {
  page.text(kLeft, y, "median (dark) and p99 (light)", title);
  y += kStep - 4;
  double most = 0;
  for (const LoadSummary& one : points) most = std::max(most, (one.*member).quantile(0.99));
  for (const LoadSummary& one : points) {
    const Samples& samples = one.*member;
    const double median = samples.quantile(0.5), tail = samples.quantile(0.99);
    const double scale = most > 0 ? kFull / most : 0;
    page.text(kLeft, y + 10, to_string(one.point));
    page.bar(kBars, y, tail * scale, kStep - 4, kTailColour);
    page.bar(kBars, y, median * scale, kStep - 4, kMedianColour);
    page.text(
        kBars + 6 + static_cast<int>(tail * scale), y + 10,
        samples.seconds.empty() ? "nothing answered" : fmt::format("{:.1f}, {:.1f} ms", median * 1e3, tail * 1e3));
    y += kStep;
  }
  y += 2 * kStep;
}

}  // namespace

LoadSummary summary_of(const LoadResult& result) {
  LoadSummary out;
  out.point = result.point;
  out.seconds = result.seconds;
  out.was_stopped = result.was_stopped;
  out.num_requests = static_cast<int64_t>(result.records.size());
  for (const RequestRecord& record : result.records) {
    if (record.status == 429) {
      ++out.num_refused;
      out.refusal.seconds.push_back(record.end - record.due);
      continue;
    }
    if (!record.error.empty()) {
      ++out.errors[printable(record.error, kErrorBytes)];
      continue;
    }
    ++out.num_answered;
    out.prompt_tokens += record.prompt_tokens;
    out.cached_tokens += record.cached_tokens;
    out.output_tokens += record.output_tokens;
    out.whole.seconds.push_back(record.end - record.due);
    if (record.texts.empty()) continue;
    out.first_token.seconds.push_back(record.texts.front() - record.due);
    for (size_t i = 1; i < record.texts.size(); ++i) {
      out.between_texts.seconds.push_back(record.texts[i] - record.texts[i - 1]);
    }
    if (record.output_tokens > 1) {
      out.per_token.seconds.push_back((record.texts.back() - record.texts.front()) /
                                      static_cast<double>(record.output_tokens - 1));
    }
  }
  return out;
}

std::string to_string(const LoadPoint& point) {
  if (point.is_open()) return fmt::format("{:g} requests/s", point.requests_per_second);
  return fmt::format("{} at a time", point.concurrency);
}

std::string load_table_head() {
  const std::string quantiles = fmt::format("{:>8} {:>8} {:>8}", "p50", "p90", "p99");
  return fmt::format("{:<18} {:>8} {:>5} {:>6} {:>8} {:>9} {:>8}  {:^26}  {:^26}  {:^26}\n", "", "", "", "", "answers",
                     "output", "ms per", "first token (ms)", "between texts (ms)", "whole answer (ms)") +
         fmt::format("{:<18} {:>8} {:>5} {:>6} {:>8} {:>9} {:>8}  {}  {}  {}\n", "load", "answered", "429", "errors",
                     "/s", "tokens/s", "token", quantiles, quantiles, quantiles);
}

std::string load_table_row(const LoadSummary& one) {
  const int64_t num_failed = one.num_requests - one.num_answered - one.num_refused;
  return fmt::format("{:<18} {:>8} {:>5} {:>6} {:>8.2f} {:>9.1f} {:>8.2f}  {}  {}  {}\n", to_string(one.point),
                     one.num_answered, one.num_refused, num_failed, one.requests_per_second(), one.tokens_per_second(),
                     one.per_token.quantile(0.5) * 1e3, triple(one.first_token), triple(one.between_texts),
                     triple(one.whole));
}

std::vector<std::string> load_notes(const LoadSummary& one) {
  std::vector<std::string> out;
  for (const auto& [error, count] : one.errors) {
    out.push_back(fmt::format("{}: {} times: {}", to_string(one.point), count, error));
  }
  if (one.was_stopped) out.push_back(fmt::format("{}: stopped before its end", to_string(one.point)));
  return out;
}

std::string load_svg(const std::vector<LoadSummary>& points, const std::string& what, const std::string& machine) {
  SvgPage page(1000);
  int y = 18;
  page.text(kLeft, y, what, "tessera bench serve");
  y += kStep;
  page.note(kLeft, y, machine);
  y += 2 * kStep;
  page.text(kLeft, y, "tokens/s", "output");
  y += kStep - 4;
  double most = 0;
  for (const LoadSummary& one : points) most = std::max(most, one.tokens_per_second());
  for (const LoadSummary& one : points) {
    const double width = most > 0 ? one.tokens_per_second() / most * kFull : 0;
    const int64_t num_failed = one.num_requests - one.num_answered - one.num_refused;
    std::string value =
        fmt::format("{:.1f} tokens/s, {:.2f} answers/s", one.tokens_per_second(), one.requests_per_second());
    if (one.num_refused > 0) value += fmt::format(", {} refused", one.num_refused);
    if (num_failed > 0) value += fmt::format(", {} failed", num_failed);
    page.text(kLeft, y + 10, to_string(one.point));
    page.bar(kBars, y, width, kStep - 4, kRateColour);
    page.text(kBars + 6 + static_cast<int>(width), y + 10, value);
    y += kStep;
  }
  y += 2 * kStep;
  times(page, y, "first token", points, &LoadSummary::first_token);
  times(page, y, "between texts", points, &LoadSummary::between_texts);
  times(page, y, "whole answer", points, &LoadSummary::whole);
  return page.finish(y);
}

}  // namespace tessera::bench
