// SPDX-License-Identifier: Apache-2.0
#pragma once
// Ctrl-C, and requests to end (SIGTERM, SIGHUP), as a flag that long work looks at between steps, or as the end of what
// does not look.
#include <array>
#include <atomic>
#include <csignal>
#include <functional>
#include <thread>

namespace tessera::app {

enum class InterruptEnd {
  kSecondEndsProgram,  // the first Ctrl-C sets the flag, the second ends the program as usual
  kNever,              // every Ctrl-C sets the flag
};

// Installs the handler; blocking reads then end early (EINTR) instead of being resumed.
void watch_interrupt(InterruptEnd end);

// True once Ctrl-C was pressed. Whoever has dealt with it may set it to false.
std::atomic<bool>& interrupted();

// For work that looks at no flag: on Ctrl-C calls `end`, from a thread of its own, again and again until it ends the
// program or this goes; a second Ctrl-C ends it as usual. When this goes the handlers are what they were, but where
// others have been installed meanwhile: so there is no moment without any.
class InterruptWatch {
 public:
  explicit InterruptWatch(std::function<void()> end);
  ~InterruptWatch();
  InterruptWatch(const InterruptWatch&) = delete;
  InterruptWatch& operator=(const InterruptWatch&) = delete;

 private:
  std::function<void()> end_;
  std::array<struct sigaction, 3> before_{};
  std::jthread thread_;
};

}  // namespace tessera::app
