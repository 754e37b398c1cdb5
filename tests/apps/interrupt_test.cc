// SPDX-License-Identifier: Apache-2.0
// Who has a signal's handler while work that is watched becomes work that watches by itself.
#include "interrupt.h"

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>

namespace tessera::app {
namespace {

void on_anothers(int) {}

void (*handler_of(int signal))(int) {
  struct sigaction now {};
  sigaction(signal, nullptr, &now);
  return now.sa_handler;
}

class InterruptWatchTest : public ::testing::Test {
 protected:
  InterruptWatchTest() { reset(); }
  ~InterruptWatchTest() override { reset(); }

  static void reset() {
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, SIG_DFL);
    interrupted() = false;
  }
};

TEST_F(InterruptWatchTest, LeavesWhatWasThere) {
  std::signal(SIGTERM, on_anothers);
  std::signal(SIGHUP, SIG_IGN);  // nohup's stays
  {
    const InterruptWatch watch([] {});
    EXPECT_NE(handler_of(SIGTERM), on_anothers);
    EXPECT_EQ(handler_of(SIGHUP), SIG_IGN);
  }
  EXPECT_EQ(handler_of(SIGINT), SIG_DFL);
  EXPECT_EQ(handler_of(SIGTERM), on_anothers);
  EXPECT_EQ(handler_of(SIGHUP), SIG_IGN);
}

// Between its end and another's beginning a signal would end the program as nobody meant it to.
TEST_F(InterruptWatchTest, TakesNoHandlerThatCameMeanwhile) {
  {
    const InterruptWatch watch([] {});
    std::signal(SIGTERM, on_anothers);
  }
  EXPECT_EQ(handler_of(SIGTERM), on_anothers);
  EXPECT_EQ(handler_of(SIGINT), SIG_DFL);
  {
    const InterruptWatch watch([] {});
    watch_interrupt(InterruptEnd::kSecondEndsProgram);
  }
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) ASSERT_NE(handler_of(signal), SIG_DFL) << signal;
  std::raise(SIGINT);
  EXPECT_TRUE(interrupted());
}

TEST_F(InterruptWatchTest, CallsItsEndUntilThatHasSeenTo) {
  std::atomic<int> calls{0};
  const InterruptWatch watch([&] { ++calls; });
  std::raise(SIGINT);
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (calls < 2 && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
  EXPECT_GE(calls, 2);
}

}  // namespace
}  // namespace tessera::app
