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

// Holds a thread on some processors; when its last owner lets go, on whatever thread, the thread may run again where it
// might before, unless it has ended. One per thread: several teams with the same caller share it.
class ThreadPin {
 public:
  // Pins the calling thread, or gives the pin that it has (whose processors stay). Null where the system refuses.
  static std::shared_ptr<ThreadPin> pin_caller(const std::vector<int>& processors);
  ThreadPin(const ThreadPin&) = delete;
  ThreadPin& operator=(const ThreadPin&) = delete;
  ~ThreadPin();

  // Where the thread might run before.
  const std::vector<int>& before() const { return before_; }
  // Whether the calling thread has a pin.
  static bool is_caller_pinned();

 private:
  class HeldThread;
  ThreadPin(std::shared_ptr<HeldThread> thread, std::vector<int> before)
      : thread_(std::move(thread)), before_(std::move(before)) {}

  std::shared_ptr<HeldThread> thread_;
  std::vector<int> before_;
};

}  // namespace tessera::device
