// SPDX-License-Identifier: Apache-2.0
#include "device/thread_pool.h"

#include <fmt/format.h>

#include <system_error>
#include <utility>

#include "base/error.h"

namespace tessera::device {

namespace {

constexpr uint64_t kClosed = 0xFFFFFFFF;
// Pauses before a waiting thread sleeps: about 20 to 50 microseconds, less than waking it costs twice.
constexpr int kSpins = 1000;

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Returns once value is no longer `old`.
void wait_while(const std::atomic<int32_t>& value, int32_t old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause_briefly();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(int num_threads, std::span<const std::vector<int>> places) : ticket_(kClosed) {
  TESSERA_CHECK(places.empty() || places.size() == static_cast<size_t>(num_threads),
                fmt::format("{} places for {} threads", places.size(), num_threads));
  if (!places.empty()) caller_place_ = places.front();
  try {
    for (int i = 1; i < num_threads; ++i) {
      std::vector<int> affinity;
      if (!places.empty()) {
        affinity = places[static_cast<size_t>(i)];
      } else if (ThreadPin::is_caller_pinned()) {
        affinity = unpinned_affinity();  // not the place of the thread that starts them
      }
      workers_.emplace_back([this, affinity] {
        if (!affinity.empty()) set_affinity(affinity);
        work();
      });
    }
  } catch (const std::system_error& error) {
    const size_t started = workers_.size();
    end();
    fail(ErrorCode::kResourceExhausted, fmt::format("threads: expected to start {}, the system gave {}: {}",
                                                    num_threads - 1, started, error.code().message()));
  }
}

ThreadPool::~ThreadPool() {
  end();
}

void ThreadPool::end() {
  is_ending_ = true;
  num_loops_.fetch_add(1, std::memory_order_release);
  num_loops_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::hold_caller() {
  if (caller_place_.empty() || held_caller_ == std::this_thread::get_id()) return;
  caller_pin_.reset();  // a caller of before
  caller_pin_ = ThreadPin::pin_caller(caller_place_);
  held_caller_ = std::this_thread::get_id();
}

void ThreadPool::run(int64_t count, int64_t num_parts, const RangeFunction& function) {
  hold_caller();
  const uint64_t loop = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
  ticket_.store(loop << 32 | kClosed, std::memory_order_relaxed);
  // Released, so that who sees a new field also sees the closed ticket.
  function_.store(&function, std::memory_order_release);
  count_.store(count, std::memory_order_release);
  num_parts_.store(num_parts, std::memory_order_release);
  num_unfinished_.store(static_cast<int32_t>(num_parts), std::memory_order_relaxed);
  ticket_.store(loop << 32, std::memory_order_release);
  num_loops_.fetch_add(1, std::memory_order_release);
  num_loops_.notify_all();
  claim_and_call();
  for (int32_t left = num_unfinished_.load(std::memory_order_acquire); left != 0;
       left = num_unfinished_.load(std::memory_order_acquire)) {
    wait_while(num_unfinished_, left);
  }
  if (first_error_) std::rethrow_exception(std::exchange(first_error_, nullptr));
}

void ThreadPool::work() {
  for (;;) {
    const int32_t seen = num_loops_.load(std::memory_order_acquire);
    if (is_ending_) return;
    claim_and_call();
    wait_while(num_loops_, seen);
  }
}

void ThreadPool::claim_and_call() {
  for (;;) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    const int64_t part = static_cast<int64_t>(ticket & 0xFFFFFFFF);
    const RangeFunction* function = function_.load(std::memory_order_acquire);
    const int64_t count = count_.load(std::memory_order_acquire);
    const int64_t num_parts = num_parts_.load(std::memory_order_acquire);
    if (part >= num_parts) return;
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
    call_part(*function, count * part / num_parts, count * (part + 1) / num_parts);
    if (num_unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) num_unfinished_.notify_all();
  }
}

void ThreadPool::call_part(const RangeFunction& function, int64_t begin, int64_t end) {
  try {
    function(begin, end);
  } catch (...) {
    const std::lock_guard<std::mutex> hold(error_lock_);
    if (!first_error_) first_error_ = std::current_exception();
  }
}

}  // namespace tessera::device
