// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a communicator has begun and not seen the end of, for the watchdog that ends it where a rank stalls.
#include <fmt/format.h>

#include <chrono>
#include <string>

namespace tessera::comm {

// Under the communicator's lock.
class PendingCall {
 public:
  explicit PendingCall(double limit_seconds) : limit_(limit_seconds) {}

  // A step, which takes the place of whatever was begun before. Not limited: it may take as long as it will.
  void begin_step(bool is_limited) { begin("a step", is_limited); }
  // A collective, of which the first counts, and none inside a step.
  void begin_call(const char* what) {
    if (what_ == nullptr) begin(what, true);
  }
  // All that was begun has ended.
  void clear() { what_ = nullptr; }

  const char* what() const { return what_ != nullptr ? what_ : "between calls"; }
  bool is_over() const { return what_ != nullptr && is_limited_ && Clock::now() - since_ > limit_; }
  std::string stalled(int rank, int world) const {
    return fmt::format("rank {} of {}: {} did not end within {:.3g} s: a rank stalls", rank, world, what(),
                       limit_.count());
  }
  double limit_seconds() const { return limit_.count(); }

 private:
  using Clock = std::chrono::steady_clock;
  void begin(const char* what, bool is_limited) { what_ = what, since_ = Clock::now(), is_limited_ = is_limited; }

  const std::chrono::duration<double> limit_;
  const char* what_ = nullptr;
  Clock::time_point since_;
  bool is_limited_ = true;
};

}  // namespace tessera::comm
