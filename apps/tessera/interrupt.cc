// SPDX-License-Identifier: Apache-2.0
#include "interrupt.h"

#include <csignal>

namespace tessera::app {

namespace {

std::atomic<bool> g_is_interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler writes it");

void on_interrupt(int) {
  g_is_interrupted = true;
}

}  // namespace

void watch_interrupt(InterruptEnd end) {
  struct sigaction action {};
  action.sa_handler = on_interrupt;
  sigemptyset(&action.sa_mask);
  if (end == InterruptEnd::kSecondEndsProgram) action.sa_flags = static_cast<int>(SA_RESETHAND);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaction(signal, &action, nullptr);
}

std::atomic<bool>& interrupted() {
  return g_is_interrupted;
}

}  // namespace tessera::app
