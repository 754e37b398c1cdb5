// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where work runs, in order. On a CPU a queue is a team of threads and calls finish before they return.
#include <cstdint>
#include <memory>
#include <type_traits>

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

class Queue {
 public:
  // num_threads 0: one per core that this process may use.
  explicit Queue(int num_threads = 0);
  int num_threads() const { return num_threads_; }

  // Calls function(begin, end) on parts of [0, count) in an unspecified order, from several threads, and returns when
  // all are done. `grain` is the fewest items worth a thread. Results must not depend on how the range is cut: each
  // item writes its own output. The first exception of any part is thrown again here.
  void parallel_for(int64_t count, int64_t grain, RangeFunction function);

 private:
  int num_threads_;
};

}  // namespace tessera::device
