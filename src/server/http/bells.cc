// SPDX-License-Identifier: Apache-2.0
#include "server/http/bells.h"

#include <boost/asio/bind_allocator.hpp>
#include <boost/asio/post.hpp>
#include <exception>
#include <new>
#include <utility>

namespace tessera::server::http {

// Gives out the bytes of the one handler under way.
template <class T>
struct Bells::OneRing {
  using value_type = T;
  explicit OneRing(std::byte* its_bytes) : bytes(its_bytes) {}
  template <class U>
  OneRing(const OneRing<U>& other) : bytes(other.bytes) {}
  T* allocate(size_t count) {
    if (count * sizeof(T) > kRingBytes) throw std::bad_alloc();
    return reinterpret_cast<T*>(bytes);
  }
  void deallocate(T*, size_t) {}
  template <class U>
  bool operator==(const OneRing<U>& other) const {
    return bytes == other.bytes;
  }
  std::byte* bytes;
};

// One after the other: each would take the next one along.
Bells::~Bells() {
  while (first_ != nullptr) take_first();
}

// Under lock_.
std::shared_ptr<Bells::Bell> Bells::take_first() {
  std::shared_ptr<Bell> bell = std::move(first_);
  first_ = std::move(bell->next_);
  if (first_ == nullptr) last_ = nullptr;
  return bell;
}

void Bells::ring(std::shared_ptr<Bell> bell) noexcept {
  if (bell->is_rung_.exchange(true)) return;
  const std::lock_guard<std::mutex> hold(lock_);
  Bell* const now_last = bell.get();
  (last_ == nullptr ? first_ : last_->next_) = std::move(bell);
  last_ = now_last;
  if (is_posted_) return;
  try {
    post();
    is_posted_ = true;
  } catch (const std::exception&) {
    // Asio does not rule it out: the next ring tries again, and a connection looks by itself before it is silent for
    // long.
  }
}

void Bells::post() {
  asio::post(io_, asio::bind_allocator(OneRing<void>(ring_.data()), [this] { answer(); }));
}

// Those that are rung meanwhile are for the next turn, so that nobody is kept waiting by a bell that never stops.
void Bells::answer() {
  std::shared_ptr<Bell> bell;
  {
    const std::lock_guard<std::mutex> hold(lock_);
    is_posted_ = false;  // its memory is free by now
    bell = std::move(first_);
    last_ = nullptr;
  }
  while (bell != nullptr) {
    std::shared_ptr<Bell> next = std::move(bell->next_);
    bell->is_rung_ = false;
    bell->rung();
    bell = std::move(next);
  }
}

}  // namespace tessera::server::http
