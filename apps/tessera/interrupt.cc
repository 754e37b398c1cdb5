// SPDX-License-Identifier: Apache-2.0
#include "interrupt.h"

#include <chrono>
#include <utility>

namespace tessera::app {

namespace {

constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP};

std::atomic<bool> g_is_interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler writes it");

void on_interrupt(int) {
  g_is_interrupted = true;
}

// Those of others resume no reads, or are not this one.
bool is_watching(int signal) {
  struct sigaction now {};
  sigaction(signal, nullptr, &now);
  return now.sa_handler == on_interrupt && (now.sa_flags & SA_RESTART) != 0;
}

}  // namespace

void watch_interrupt(InterruptEnd end) {
  struct sigaction action {};
  action.sa_handler = on_interrupt;
  sigemptyset(&action.sa_mask);
  if (end == InterruptEnd::kSecondEndsProgram) action.sa_flags = static_cast<int>(SA_RESETHAND);
  for (const int signal : kSignals) sigaction(signal, &action, nullptr);
}

std::atomic<bool>& interrupted() {
  return g_is_interrupted;
}

InterruptWatch::InterruptWatch(std::function<void()> end) : end_(std::move(end)) {
  struct sigaction action {};
  action.sa_handler = on_interrupt;
  sigemptyset(&action.sa_mask);
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);  // what is read goes on until the end
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], nullptr, &before_[i]);
    if (before_[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &action, nullptr);
  }
  thread_ = std::jthread([this](const std::stop_token& stop) {
    for (; !stop.stop_requested(); std::this_thread::sleep_for(std::chrono::milliseconds(20))) {
      if (interrupted()) end_();
    }
  });
}

InterruptWatch::~InterruptWatch() {
  thread_.request_stop();
  thread_.join();
  for (size_t i = 0; i < kSignals.size(); ++i) {
    if (is_watching(kSignals[i])) sigaction(kSignals[i], &before_[i], nullptr);
  }
  if (interrupted()) end_();
}

}  // namespace tessera::app
