// SPDX-License-Identifier: Apache-2.0
#pragma once
// Progress on stderr: a moving bar with rate and time left on a terminal, a line every tenth when piped, nothing for
// work that takes less than a second.
#include <chrono>
#include <string>

#include "base/log.h"

namespace tessera::app {

class ProgressBar final : public ProgressSink {
 public:
  explicit ProgressBar(bool is_quiet);
  void begin(std::string_view phase, uint64_t total, std::string_view unit) override;
  void advance(uint64_t amount) override;
  void end() override;

 private:
  void draw(double seconds);
  std::string amounts(double seconds) const;

  bool is_quiet_, is_terminal_;
  std::string phase_, unit_;
  uint64_t total_ = 0, done_ = 0;
  int last_tenth_ = 0;
  bool is_shown_ = false;
  std::chrono::steady_clock::time_point start_, last_draw_;
};

}  // namespace tessera::app
