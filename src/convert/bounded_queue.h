// SPDX-License-Identifier: Apache-2.0
#pragma once
// Hands items from one thread to another, in order, with a bound on what waits in between. Either side may end it with
// an error, which the other side meets as an exception at its next call.
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>

namespace tessera::convert {

template <class Item>
class BoundedQueue {
 public:
  // `max_weight`: what may wait; a single heavier item is let in when nothing else waits.
  explicit BoundedQueue(uint64_t max_weight) : max_weight_(max_weight) {}

  // Waits for room. False where the queue was closed; throws the other side's error.
  bool push(Item item, uint64_t weight) {
    std::unique_lock<std::mutex> hold(lock_);
    changed_.wait(hold, [&] { return is_closed_ || error_ || items_.empty() || weight_ + weight <= max_weight_; });
    if (error_) std::rethrow_exception(error_);
    if (is_closed_) return false;
    weight_ += weight;
    items_.emplace_back(std::move(item), weight);
    changed_.notify_all();
    return true;
  }

  // Waits for an item; nothing once the queue is closed and empty. Throws the other side's error.
  std::optional<Item> pop() {
    std::unique_lock<std::mutex> hold(lock_);
    changed_.wait(hold, [&] { return is_closed_ || error_ || !items_.empty(); });
    if (error_) std::rethrow_exception(error_);
    if (items_.empty()) return std::nullopt;
    std::pair<Item, uint64_t> next = std::move(items_.front());
    items_.pop_front();
    weight_ -= next.second;
    changed_.notify_all();
    return std::move(next.first);
  }

  // No more items come; what waits may still be taken.
  void close() {
    const std::lock_guard<std::mutex> hold(lock_);
    is_closed_ = true;
    changed_.notify_all();
  }
  // Ends it now: what waits is dropped. The first error stays.
  void fail(std::exception_ptr error) {
    const std::lock_guard<std::mutex> hold(lock_);
    if (!error_) error_ = std::move(error);
    items_.clear();
    changed_.notify_all();
  }

 private:
  const uint64_t max_weight_;
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::pair<Item, uint64_t>> items_;
  uint64_t weight_ = 0;
  bool is_closed_ = false;
  std::exception_ptr error_;
};

}  // namespace tessera::convert
