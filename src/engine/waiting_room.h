// SPDX-License-Identifier: Apache-2.0
#pragma once
// How much may wait to be begun, and what who comes too many is told. Thread-safe; time is passed in.
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

namespace tessera::engine {

struct Refusal {
  enum class Reason {
    kFault,     // the request itself; asking again does not help
    kTooLarge,  // it could never run here
    kFull,      // too much waits; retry_after_seconds
    kDraining,  // the engine takes no more
  };
  Reason reason = Reason::kFault;
  std::string message;  // one line, with figures
  int64_t retry_after_seconds = 0;
};

class WaitingRoom {
 public:
  struct Limits {
    int64_t max_requests = 1024;
    int64_t max_tokens = 1 << 20;  // of prompts; a longer prompt is let in when nobody waits
  };
  explicit WaitingRoom(const Limits& limits) : limits_(limits) {}

  // A request with so many prompt tokens comes to wait, or is refused (kFull).
  std::optional<Refusal> enter(int64_t num_tokens);
  // Whether enter() would refuse, now.
  std::optional<Refusal> check(int64_t num_tokens) const;
  // It was begun at `now` (seconds, of one clock): counts for the estimate of Retry-After.
  void leave_begun(int64_t num_tokens, double now);
  // It was cancelled.
  void leave(int64_t num_tokens);

  int64_t num_requests() const;
  int64_t num_tokens() const;

 private:
  std::optional<Refusal> refusal(int64_t num_tokens) const;
  int64_t retry_after(double excess_requests, double excess_tokens) const;

  const Limits limits_;
  mutable std::mutex lock_;
  int64_t num_requests_ = 0, num_tokens_ = 0;
  // What left lately, older leavings counting for less.
  double recent_requests_ = 0, recent_tokens_ = 0, recent_seconds_ = 0, last_left_ = 0;
};

}  // namespace tessera::engine
