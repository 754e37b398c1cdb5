// SPDX-License-Identifier: Apache-2.0
#include "progress_bar.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "base/env.h"
#include "base/strings.h"

namespace tessera::app {

namespace {

constexpr double kShowAfterSeconds = 1;
constexpr double kRedrawSeconds = 0.1;
constexpr int kBarWidth = 24;

double seconds_between(std::chrono::steady_clock::time_point a, std::chrono::steady_clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

}  // namespace

ProgressBar::ProgressBar(bool is_quiet)
    : is_quiet_(is_quiet), is_terminal_(isatty(STDERR_FILENO) != 0 && !env_value("NO_COLOR")) {}

void ProgressBar::begin(std::string_view phase, uint64_t total, std::string_view unit) {
  phase_ = phase, unit_ = unit, total_ = total;
  done_ = 0, last_tenth_ = 0, is_shown_ = false;
  start_ = last_draw_ = std::chrono::steady_clock::now();
}

void ProgressBar::advance(uint64_t amount) {
  done_ += amount;
  const auto now = std::chrono::steady_clock::now();
  const double seconds = seconds_between(start_, now);
  if (is_quiet_ || total_ == 0 || seconds < kShowAfterSeconds) return;
  const int tenth = static_cast<int>(10 * std::min(done_, total_) / total_);
  const bool is_due = is_terminal_ ? seconds_between(last_draw_, now) >= kRedrawSeconds : tenth > last_tenth_;
  if (!is_due) return;
  last_draw_ = now, last_tenth_ = tenth;
  draw(seconds);
}

void ProgressBar::end() {
  if (is_shown_ && is_terminal_) std::fputs("\r\033[K", stderr);
  is_shown_ = false;
}

std::string ProgressBar::amounts(double seconds) const {
  const double rate = static_cast<double>(done_) / seconds;
  const double left = rate > 0 ? static_cast<double>(total_ - std::min(done_, total_)) / rate : 0;
  if (unit_ == "B") {
    return fmt::format("{} of {}, {}/s, {:.0f} s left", format_bytes(done_), format_bytes(total_),
                       format_bytes(static_cast<uint64_t>(rate)), left);
  }
  return fmt::format("{} of {} {}, {:.0f}/s, {:.0f} s left", done_, total_, unit_, rate, left);
}

void ProgressBar::draw(double seconds) {
  is_shown_ = true;
  const double share = static_cast<double>(std::min(done_, total_)) / static_cast<double>(total_);
  std::string line;
  if (is_terminal_) {
    const int filled = static_cast<int>(share * kBarWidth);
    line = fmt::format("\r{} [{}{}] {:3.0f}%  {}\033[K", phase_, std::string(static_cast<size_t>(filled), '#'),
                       std::string(static_cast<size_t>(kBarWidth - filled), '.'), share * 100, amounts(seconds));
  } else {
    line = fmt::format("{}: {:.0f}%, {}\n", phase_, share * 100, amounts(seconds));
  }
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
}

}  // namespace tessera::app
