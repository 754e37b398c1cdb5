// SPDX-License-Identifier: Apache-2.0
#pragma once
// A team of threads that share the parts of one loop at a time. Parts are claimed as threads come free, so a core that
// the machine gives to somebody else delays one part and not the loop; waiting threads spin for some microseconds, the
// gap between two ops, and then sleep.
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <type_traits>
#include <vector>

#include "device/thread_affinity.h"

namespace tessera::device {

// A reference to a callable void(int64_t begin, int64_t end); does not own it, costs no allocation.
class RangeFunction {
 public:
  template <class F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, RangeFunction>)
      RangeFunction(F&& function)  // NOLINT: implicit by design, so that a lambda can be passed
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(function)))),
        call_([](void* object, int64_t begin, int64_t end) {
          (*static_cast<std::remove_reference_t<F>*>(object))(begin, end);
        }) {}
  void operator()(int64_t begin, int64_t end) const { call_(object_, begin, end); }

 private:
  void* object_;
  void (*call_)(void*, int64_t, int64_t);
};

class ThreadPool {
 public:
  // Starts num_threads - 1 threads: the caller of run() is the other one. Throws kResourceExhausted where the system
  // gives fewer. `places` is empty, or has for each thread the processors on which it is held: the started ones until
  // the pool ends, and from its first run() until then the caller too, who had the choice before and gets it back.
  explicit ThreadPool(int num_threads, std::span<const std::vector<int>> places = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls function(begin, end) on num_parts near-equal parts of [0, count), which all are done on return; then throws
  // the first exception that one threw. One caller at a time; not from inside a part.
  void run(int64_t count, int64_t num_parts, const RangeFunction& function);

 private:
  void end();             // stops and joins the workers
  void work();            // what a worker thread does until the pool ends
  void hold_caller();     // in the first place, where that was asked for
  void claim_and_call();  // parts of the open loop, until none is unclaimed
  void call_part(const RangeFunction& function, int64_t begin, int64_t end);

  // The open loop. `ticket_` is its number (high half) and its next unclaimed part (low half); a part belongs to the
  // thread that moved the ticket on. Between loops the low half is kClosed, so that a thread that read an old loop's
  // fields can't claim from the next.
  std::atomic<uint64_t> ticket_;
  std::atomic<const RangeFunction*> function_{nullptr};
  std::atomic<int64_t> count_{0}, num_parts_{0};

  alignas(64) std::atomic<int32_t> num_unfinished_{0};  // parts
  alignas(64) std::atomic<int32_t> num_loops_{0};       // what sleeping workers wait on
  std::atomic<bool> is_ending_{false};
  std::mutex error_lock_;
  std::exception_ptr first_error_;
  std::vector<std::thread> workers_;
  std::vector<int> caller_place_;  // empty: not to be held
  std::thread::id held_caller_;
  std::shared_ptr<ThreadPin> caller_pin_;
};

}  // namespace tessera::device
