// SPDX-License-Identifier: Apache-2.0
#pragma once
// Ctrl-C, and requests to end (SIGTERM, SIGHUP), as a flag that long work looks at between steps.
#include <atomic>

namespace tessera::app {

enum class InterruptEnd {
  kSecondEndsProgram,  // the first Ctrl-C sets the flag, the second ends the program as usual
  kNever,              // every Ctrl-C sets the flag
};

// Installs the handler; blocking reads then end early (EINTR) instead of being resumed.
void watch_interrupt(InterruptEnd end);

// True once Ctrl-C was pressed. Whoever has dealt with it may set it to false.
std::atomic<bool>& interrupted();

}  // namespace tessera::app
