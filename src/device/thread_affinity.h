// SPDX-License-Identifier: Apache-2.0
#pragma once
// On which processors a thread may run. Where the system has no such calls, or refuses them, nothing happens: placement
// is never needed for a right result.
#include <memory>
#include <vector>

namespace tessera::device {

// Processors on which the calling thread might run if no ThreadPin held it; ascending, empty where the system does not
// say. Threads inherit the mask of the thread that starts them, so this, and not the mask, is what a new team gets.
std::vector<int> unpinned_affinity();

// Lets the calling thread run on these processors only; returns whether the system did so.
bool set_affinity(const std::vector<int>& processors);

// Holds a thread on one processor; when its last owner lets go, on whatever thread, the thread may run again where it
// might before. One per thread: several teams with the same caller share it.
class ThreadPin {
 public:
  // Pins the calling thread, or gives the pin that it has (whose processor stays). Null where the system refuses.
  static std::shared_ptr<ThreadPin> pin_caller(int processor);
  ThreadPin(const ThreadPin&) = delete;
  ThreadPin& operator=(const ThreadPin&) = delete;
  ~ThreadPin();

  // Where the thread might run before.
  const std::vector<int>& before() const { return before_; }
  // Whether the calling thread has a pin.
  static bool is_caller_pinned();

 private:
  ThreadPin(int thread_id, std::vector<int> before) : thread_id_(thread_id), before_(std::move(before)) {}

  int thread_id_;
  std::vector<int> before_;
};

}  // namespace tessera::device
