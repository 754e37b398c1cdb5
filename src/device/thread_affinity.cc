// SPDX-License-Identifier: Apache-2.0
#include "device/thread_affinity.h"

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <mutex>
#include <utility>

namespace tessera::device {

namespace {

// The pin of this thread, if any: the mask alone can't say whether we or the user narrowed it.
thread_local std::weak_ptr<ThreadPin> pin_of_this_thread;

#if defined(__linux__)

constexpr int kMaxProcessors = 1 << 16;

class CpuMask {
 public:
  explicit CpuMask(int num_processors)
      : count_(num_processors), bytes_(CPU_ALLOC_SIZE(num_processors)), mask_(CPU_ALLOC(num_processors)) {
    if (mask_ != nullptr) CPU_ZERO_S(bytes_, mask_);
  }
  CpuMask(const CpuMask&) = delete;
  CpuMask& operator=(const CpuMask&) = delete;
  ~CpuMask() { CPU_FREE(mask_); }

  // `thread_id` 0: the calling thread.
  bool read(int thread_id) { return mask_ != nullptr && sched_getaffinity(thread_id, bytes_, mask_) == 0; }
  bool apply(int thread_id, const std::vector<int>& processors) {
    if (mask_ == nullptr) return false;
    for (const int processor : processors) CPU_SET_S(static_cast<size_t>(processor), bytes_, mask_);
    return sched_setaffinity(thread_id, bytes_, mask_) == 0;
  }
  std::vector<int> list() const {
    std::vector<int> processors;
    for (int i = 0; i < count_; ++i) {
      if (CPU_ISSET_S(static_cast<size_t>(i), bytes_, mask_)) processors.push_back(i);
    }
    return processors;
  }

 private:
  int count_;
  size_t bytes_;
  cpu_set_t* mask_;
};

int calling_thread_id() {
  return static_cast<int>(syscall(SYS_gettid));
}

std::vector<int> affinity_of_caller() {
  // The kernel refuses a mask that is shorter than its own.
  for (int count = 1024; count <= kMaxProcessors; count *= 2) {
    CpuMask mask(count);
    if (mask.read(0)) return mask.list();
  }
  return {};
}

bool apply_affinity(int thread_id, const std::vector<int>& processors) {
  if (processors.empty()) return false;
  const auto [least, most] = std::minmax_element(processors.begin(), processors.end());
  if (*least < 0 || *most >= kMaxProcessors) return false;
  return CpuMask(*most + 1).apply(thread_id, processors);
}

#else

int calling_thread_id() {
  return 0;
}

std::vector<int> affinity_of_caller() {
  return {};
}

bool apply_affinity(int, const std::vector<int>&) {
  return false;
}

#endif

}  // namespace

std::vector<int> unpinned_affinity() {
  const auto pin = pin_of_this_thread.lock();
  return pin ? pin->before() : affinity_of_caller();
}

bool set_affinity(const std::vector<int>& processors) {
  return apply_affinity(0, processors);
}

// A thread by the system's number, which the system gives to another thread, perhaps of another program, once this one
// has ended. So a thread says when it ends, and can't end while it is being changed.
class ThreadPin::HeldThread {
 public:
  // Of the calling thread.
  static std::shared_ptr<HeldThread> of_caller() {
    struct Owner {
      std::shared_ptr<HeldThread> held = std::make_shared<HeldThread>();
      ~Owner() { held->end(); }
    };
    thread_local Owner owner;
    return owner.held;
  }

  void set_affinity_unless_ended(const std::vector<int>& processors) {
    const std::lock_guard<std::mutex> hold(lock_);
    if (!has_ended_) apply_affinity(id_, processors);
  }

 private:
  void end() {
    const std::lock_guard<std::mutex> hold(lock_);
    has_ended_ = true;
  }

  std::mutex lock_;
  int id_ = calling_thread_id();
  bool has_ended_ = false;
};

std::shared_ptr<ThreadPin> ThreadPin::pin_caller(const std::vector<int>& processors) {
  if (auto pin = pin_of_this_thread.lock()) return pin;
  std::vector<int> before = affinity_of_caller();
  if (before.empty()) return nullptr;
  const std::shared_ptr<ThreadPin> pin(new ThreadPin(HeldThread::of_caller(), std::move(before)));
  if (!set_affinity(processors)) return nullptr;
  pin_of_this_thread = pin;
  return pin;
}

ThreadPin::~ThreadPin() {
  thread_->set_affinity_unless_ended(before_);
}

bool ThreadPin::is_caller_pinned() {
  return !pin_of_this_thread.expired();
}

}  // namespace tessera::device
