// SPDX-License-Identifier: Apache-2.0
#include "comm/loopback.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <numeric>

#include "base/error.h"
#include "comm/rank_sum.h"

namespace tessera::comm {

namespace {

// What a rank wants. Ranks agree in all that is compared.
struct Call {
  const char* name = "";
  DType in_type = DType::kU8, out_type = DType::kU8;
  int64_t count = 0;  // elements of all_reduce's array, of a rank's part of the others
  int root = 0;
  const void* in = nullptr;
  void* out = nullptr;
  std::span<const int64_t> send_bytes{}, receive_bytes{};

  bool agrees(const Call& other) const {
    return std::strcmp(name, other.name) == 0 && in_type == other.in_type && out_type == other.out_type &&
           count == other.count && root == other.root;
  }
  std::string to_string() const { return fmt::format("{} of {} {}", name, count, dtype_name(in_type)); }
};

// Where ranks meet: all bring their calls, all compute, all go on. While they compute nobody leaves, since arrays of
// each are read by the others.
class Group {
 public:
  Group(int world, double limit_seconds)
      : calls_(static_cast<size_t>(world)), has_come_(static_cast<size_t>(world)), limit_(limit_seconds) {}

  size_t world() const { return calls_.size(); }
  const Call& call(size_t rank) const { return calls_[rank]; }

  // Brings the call of `rank` and waits for all others. Throws where one does not come.
  void arrive(size_t rank, const Call& call) {
    std::unique_lock lock(lock_);
    refuse_if_ended();
    calls_[rank] = call, has_come_[rank] = true;
    if (++num_here_ == world()) {
      num_computing_ = world();
      ++round_;
      changed_.notify_all();
      return;
    }
    const uint64_t round = round_;
    const bool is_in_time = changed_.wait_for(lock, limit_, [&] { return round_ != round || !why_ended_.empty(); });
    if (round_ != round) return;
    if (!is_in_time) {
      const size_t missing =
          static_cast<size_t>(std::find(has_come_.begin(), has_come_.end(), false) - has_come_.begin());
      end(fmt::format("rank {} of {} did not come to {} within {:.3g} s", missing, world(), call.to_string(),
                      limit_.count()));
    }
    refuse_if_ended();
  }

  // Behind computing: goes on when all have.
  void leave() {
    std::unique_lock lock(lock_);
    if (--num_computing_ == 0) {
      num_here_ = 0;
      std::fill(has_come_.begin(), has_come_.end(), false);
      ++departures_;
      changed_.notify_all();
      return;
    }
    const uint64_t departures = departures_;
    changed_.wait(lock, [&] { return departures_ != departures; });
  }

  void abort(const std::string& why) {
    const std::lock_guard lock(lock_);
    end(why);
  }
  void check() {
    const std::lock_guard lock(lock_);
    refuse_if_ended();
  }

 private:
  void end(const std::string& why) {
    if (why_ended_.empty()) why_ended_ = why.empty() ? "aborted" : why;
    changed_.notify_all();
  }
  void refuse_if_ended() const {
    if (!why_ended_.empty()) fail(ErrorCode::kDeviceError, why_ended_);
  }

  std::mutex lock_;
  std::condition_variable changed_;
  std::vector<Call> calls_;
  std::vector<bool> has_come_;
  size_t num_here_ = 0, num_computing_ = 0;
  uint64_t round_ = 0, departures_ = 0;
  std::string why_ended_;
  const std::chrono::duration<double> limit_;
};

class Loopback final : public Communicator {
 public:
  Loopback(int rank, int world, std::shared_ptr<Group> group)
      : Communicator(rank, world), group_(std::move(group)), self_(static_cast<size_t>(rank)) {}
  ~Loopback() override { group_->abort(fmt::format("rank {} of {} has left", rank(), world())); }
  void abort(const std::string& why) noexcept override { group_->abort(why); }
  void check() override { group_->check(); }

 protected:
  // A rank has an even share of the elements, and writes it for everybody: so an array may be summed in place.
  void do_all_reduce(const TensorView& in, const TensorView& out, device::Queue&) override {
    const int64_t count = in.shape.num_elements();
    meet({.name = "all_reduce",
          .in_type = in.dtype,
          .out_type = out.dtype,
          .count = count,
          .in = in.data,
          .out = out.data},
         [&] {
           const bool in_bf16 = in.dtype == DType::kBF16, out_bf16 = out.dtype == DType::kBF16;
           for (int64_t i = count * rank() / world(); i < count * (rank() + 1) / world(); ++i) {
             const float sum = sum_at(in_bf16, i);
             for (size_t r = 0; r < group_->world(); ++r) store_value(group_->call(r).out, out_bf16, i, sum);
           }
         });
  }

  void do_all_gather(const TensorView& in, const TensorView& out, device::Queue&) override {
    const size_t bytes = static_cast<size_t>(in.num_bytes());
    meet({.name = "all_gather",
          .in_type = in.dtype,
          .out_type = out.dtype,
          .count = in.shape.num_elements(),
          .in = in.data,
          .out = out.data},
         [&] {
           for (size_t r = 0; r < group_->world(); ++r) {
             std::memcpy(out.as<char>() + r * bytes, group_->call(r).in, bytes);
           }
         });
  }

  void do_reduce_scatter(const TensorView& in, const TensorView& out, device::Queue&) override {
    const int64_t count = out.shape.num_elements();
    meet({.name = "reduce_scatter",
          .in_type = in.dtype,
          .out_type = out.dtype,
          .count = count,
          .in = in.data,
          .out = out.data},
         [&] {
           for (int64_t i = 0; i < count; ++i) {
             store_value(out.data, out.dtype == DType::kBF16, i, sum_at(in.dtype == DType::kBF16, rank() * count + i));
           }
         });
  }

  void do_all_to_all(const Runs& send, const Runs& receive, device::Queue&) override {
    meet({.name = "all_to_all",
          .in = send.data,
          .out = receive.data,
          .send_bytes = send.bytes,
          .receive_bytes = receive.bytes},
         [&] {
           char* to = static_cast<char*>(receive.data);
           for (size_t r = 0; r < group_->world(); ++r) {
             const Call& from = group_->call(r);
             const int64_t offset =
                 std::accumulate(from.send_bytes.begin(), from.send_bytes.begin() + rank(), int64_t{0});
             const int64_t bytes = receive.bytes[r];
             if (bytes > 0) std::memcpy(to, static_cast<const char*>(from.in) + offset, static_cast<size_t>(bytes));
             to += bytes;
           }
         });
  }

  void do_broadcast(const TensorView& data, int root, device::Queue&) override {
    meet({.name = "broadcast",
          .in_type = data.dtype,
          .out_type = data.dtype,
          .count = data.shape.num_elements(),
          .root = root,
          .in = data.data,
          .out = data.data},
         [&] {
           if (root == rank()) return;
           std::memcpy(data.data, group_->call(static_cast<size_t>(root)).in, static_cast<size_t>(data.num_bytes()));
         });
  }

  void do_barrier(device::Queue&) override {
    meet({.name = "barrier"}, [] {});
  }

 private:
  // compute() runs while the arrays of all calls are there, and does not throw.
  template <class Compute>
  void meet(const Call& call, const Compute& compute) {
    group_->arrive(self_, call);
    const std::string disagreement = find_disagreement();
    if (disagreement.empty()) compute();
    if (!disagreement.empty()) group_->abort(disagreement);
    group_->leave();
    if (!disagreement.empty()) fail(ErrorCode::kDeviceError, disagreement);
  }

  // The same on every rank.
  std::string find_disagreement() const {
    const Call& first = group_->call(0);
    for (size_t r = 1; r < group_->world(); ++r) {
      const Call& call = group_->call(r);
      if (!call.agrees(first)) {
        return fmt::format("rank {} calls {}, rank 0 calls {}", r, call.to_string(), first.to_string());
      }
    }
    for (size_t a = 0; a < group_->world(); ++a) {
      const std::span<const int64_t> sent = group_->call(a).send_bytes;
      for (size_t b = 0; b < sent.size(); ++b) {
        if (const int64_t received = group_->call(b).receive_bytes[a]; received != sent[b]) {
          return fmt::format("all_to_all: rank {} sends {} bytes to rank {}, which expects {}", a, sent[b], b,
                             received);
        }
      }
    }
    return "";
  }

  float sum_at(bool is_bf16, int64_t i) const {
    return sum_in_order(static_cast<int>(group_->world()),
                        [&](int r) { return load_value(group_->call(static_cast<size_t>(r)).in, is_bf16, i); });
  }

  std::shared_ptr<Group> group_;
  size_t self_;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_loopback(int world, double limit_seconds) {
  const auto group = std::make_shared<Group>(std::clamp(world, 1, kMaxWorld), limit_seconds);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int rank = 0; rank < std::max(world, 1); ++rank) {
    ranks.push_back(std::make_unique<Loopback>(rank, world, group));
  }
  return ranks;
}

}  // namespace tessera::comm
