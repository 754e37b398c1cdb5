// SPDX-License-Identifier: Apache-2.0
#pragma once
// How other threads wake coroutines of the server's thread: each has a bell. However many are rung before that thread
// looks, it is woken once, and a ring takes no memory: where memory ends, the answer that waits is the one that must
// still be told.
#include <array>
#include <atomic>
#include <boost/asio/io_context.hpp>
#include <cstddef>
#include <memory>
#include <mutex>

namespace tessera::server::http {

namespace asio = boost::asio;

class Bells {
 public:
  class Bell {
   public:
    virtual ~Bell() = default;

   private:
    friend Bells;
    // By the server's thread, once for all rings since it was called last.
    virtual void rung() = 0;
    std::atomic<bool> is_rung_{false};
    std::shared_ptr<Bell> next_;  // that is rung; under lock_
  };

  explicit Bells(asio::io_context& io) : io_(io) {}
  ~Bells();
  // By any thread.
  void ring(std::shared_ptr<Bell> bell) noexcept;

 private:
  static constexpr size_t kRingBytes = 256;
  template <class T>
  struct OneRing;
  void post();
  void answer();
  std::shared_ptr<Bell> take_first();

  asio::io_context& io_;
  std::mutex lock_;
  std::shared_ptr<Bell> first_;  // of those that are rung, in order; under lock_
  Bell* last_ = nullptr;
  bool is_posted_ = false;
  alignas(std::max_align_t) std::array<std::byte, kRingBytes> ring_;  // of the one handler under way
};

}  // namespace tessera::server::http
