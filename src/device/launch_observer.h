// SPDX-License-Identifier: Apache-2.0
#pragma once
// Whoever wants to know which kernels this thread queues on a GPU: a test that counts them, a measurement of each.

namespace tessera::device {

// Is told while it lives, of the thread that made it; the last one made is.
class LaunchObserver {
 public:
  LaunchObserver();
  LaunchObserver(const LaunchObserver&) = delete;
  LaunchObserver& operator=(const LaunchObserver&) = delete;
  virtual ~LaunchObserver();

  // A kernel was queued; its name as errors tell it. What is thrown here ends what was queueing.
  virtual void launched(const char* kernel) = 0;
  // Null: nobody wants to know.
  static LaunchObserver* of_this_thread();

 private:
  LaunchObserver* before_;
};

}  // namespace tessera::device
