// SPDX-License-Identifier: Apache-2.0
#include "comm/peer.h"

#include <fmt/format.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "comm/connected_memory.h"
#include "comm/cuda/peer_sum.h"
#include "comm/echo.h"
#include "comm/pending_call.h"

namespace tessera::comm {

namespace {

constexpr int64_t kWordBytes = 4;
constexpr auto kWatchTime = std::chrono::milliseconds(50);

class Peer final : public Communicator {
 public:
  Peer(std::unique_ptr<Communicator> other, std::unique_ptr<PeerMemory> memory, const PeerOptions& options,
       bool is_echo)
      : Communicator(other->rank(), other->world()),
        options_(options),
        is_echo_(is_echo),
        other_(std::move(other)),
        memory_(std::move(memory)),
        pending_(options.limit_seconds),
        watchdog_([this] { watch(); }) {}
  // Also ends sums that wait for a rank that does not come any more.
  ~Peer() override {
    {
      const std::lock_guard lock(lock_);
      is_ending_ = true;
      memory_->end();
    }
    changed_.notify_all();
    watchdog_.join();
  }

  void abort(const std::string& why) noexcept override {
    end(why.empty() ? "aborted" : why);
    other_->abort(why);
  }
  void check() override {
    note([](PendingCall& pending) { pending.clear(); });
    other_->check();
  }
  void begin_to_connect(device::Executor& executor) override { other_->begin_to_connect(executor); }
  const device::PeerView* peer_view(DType in, int64_t count, int num_launches) const override {
    return options_.is_fused(world(), in, count, num_launches) ? &memory_->view() : nullptr;
  }
  void begin_step(bool is_limited) override {
    note([is_limited](PendingCall& pending) { pending.begin_step(is_limited); });
    other_->begin_step(is_limited);
  }
  void end_step() override {
    note([](PendingCall& pending) { pending.clear(); });
    other_->end_step();
  }

 protected:
  void do_all_reduce(const TensorView& in, const TensorView& out, device::Queue& queue) override {
    const int64_t count = in.shape.num_elements();
    const PeerPlan plan = options_.plan(world(), in.dtype, out.dtype, count);
    const bool is_lopsided = plan.way == PeerWay::kShares && plan.share_slots * world() != plan.num_slots;
    if (plan.slots > memory_->view().capacity || in.num_bytes() % kWordBytes != 0 || (is_echo_ && is_lopsided)) {
      return other_->all_reduce(in, out, queue);
    }
    note([](PendingCall& pending) { pending.begin_call("all_reduce"); });
    peer_sum_on_gpu(memory_->view(), plan.way, in.data, in.dtype == DType::kBF16, out.data, out.dtype == DType::kBF16,
                    count, queue);
  }
  void do_all_gather(const TensorView& in, const TensorView& out, device::Queue& queue) override {
    other_->all_gather(in, out, queue);
  }
  void do_gather_together(std::span<const Gathered> arrays, device::Queue& queue) override {
    other_->all_gather(arrays, queue);
  }
  void do_reduce_scatter(const TensorView& in, const TensorView& out, device::Queue& queue) override {
    other_->reduce_scatter(in, out, queue);
  }
  void do_all_to_all(const Runs& send, const Runs& receive, device::Queue& queue) override {
    other_->all_to_all(send, receive, queue);
  }
  void do_broadcast(const TensorView& data, int root, device::Queue& queue) override {
    other_->broadcast(data, root, queue);
  }
  // A sum ends when all ranks have come to it.
  void do_barrier(device::Queue& queue) override {
    const TensorView zeros{memory_->zeros(), DType::kF32, {PeerMemory::kNumZeros}};
    do_all_reduce(zeros, zeros, queue);
  }

 private:
  template <class Function>
  void note(const Function& function) {
    const std::lock_guard lock(lock_);
    if (!why_ended_.empty()) fail(ErrorCode::kDeviceError, why_ended_);
    function(pending_);
  }

  void end(const std::string& why) {
    const std::lock_guard lock(lock_);
    if (why_ended_.empty()) why_ended_ = why;
    memory_->end();
  }

  void watch() {
    std::unique_lock lock(lock_);
    while (!is_ending_) {
      changed_.wait_for(lock, kWatchTime);
      if (!pending_.is_over() || !why_ended_.empty()) continue;
      why_ended_ = pending_.stalled(rank(), world());
      memory_->end();
    }
  }

  const PeerOptions options_;
  const bool is_echo_;  // without the other ranks
  std::unique_ptr<Communicator> other_;
  std::unique_ptr<PeerMemory> memory_;
  std::mutex lock_;
  std::condition_variable changed_;
  PendingCall pending_;  // since check()
  std::string why_ended_;
  bool is_ending_ = false;
  std::thread watchdog_;
};

}  // namespace

std::unique_ptr<Communicator> make_peer(Bootstrap& bootstrap, std::unique_ptr<Communicator> other, std::string& why_not,
                                        const PeerOptions& options) {
  std::unique_ptr<PeerMemory> memory =
      make_connected_memory(bootstrap, {.capacity = options.capacity(bootstrap.world())}, why_not);
  if (memory == nullptr) return other;
  return std::make_unique<Peer>(std::move(other), std::move(memory), options, false);
}

std::unique_ptr<Communicator> make_peer_echo(int rank, int world, const PeerOptions& options) {
  if (world > device::kMaxPeers) {
    fail(ErrorCode::kUnsupported, fmt::format("{} ranks, at most {} can", world, device::kMaxPeers));
  }
  std::string why_not;
  std::unique_ptr<PeerMemory> memory = make_peer_memory(rank, world, {.capacity = options.capacity(world)}, why_not);
  if (memory == nullptr) fail(ErrorCode::kUnsupported, why_not);
  memory->connect_to_itself();
  return std::make_unique<Peer>(make_echo(rank, world), std::move(memory), options, true);
}

}  // namespace tessera::comm
