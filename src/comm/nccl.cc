// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "base/error.h"
#include "comm/nccl_library.h"
#include "comm/pending_call.h"
#include "comm/rank_sum.h"
#include "device/buffer.h"

namespace tessera::comm {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kWatchTime = std::chrono::milliseconds(50);
constexpr auto kInsideTime = std::chrono::milliseconds(500);  // for calls to return before an abort

int64_t width_of(DType dtype) {
  return dtype_bits(dtype) / 8;
}

char* at(const TensorView& view, int64_t element) {
  return view.as<char>() + element * width_of(view.dtype);
}

TensorView part_of(const TensorView& view, int64_t begin, int64_t count) {
  return {at(view, begin), view.dtype, {count}};
}

class Nccl final : public Communicator {
 public:
  Nccl(const NcclLibrary& library, const NcclIdentity& identity, int rank, int world, device::MemorySpace& memory,
       const NcclOptions& options)
      : Communicator(rank, world),
        library_(library),
        scratch_(static_cast<size_t>(std::max(options.scratch_bytes, int64_t{world} * 1024)), memory),
        pending_(options.limit_seconds) {
    NcclConfig config;
    const int code = library_.comm_init_rank_config(&comm_, world, identity, rank, &config);
    // It may refuse at once, and then leaves no communicator to ask.
    if (comm_ == nullptr) fail(ErrorCode::kDeviceError, described(code, "ncclCommInitRankConfig"));
    try {
      finish(code, "ncclCommInitRankConfig", options.join_seconds);
    } catch (const Error&) {
      if (comm_ != nullptr) library_.comm_abort(comm_);
      throw;
    }
    watchdog_ = std::thread([this] { watch(); });
  }

  // Aborting is also how one that is not needed any more ends: finalising would wait for ranks that may be gone.
  ~Nccl() override {
    {
      const std::lock_guard lock(lock_);
      is_ending_ = true;
    }
    changed_.notify_all();
    watchdog_.join();
    end("");
    await_connections();
    // Another thread may be aborting it.
    std::unique_lock lock(lock_);
    changed_.wait(lock, [this] { return !is_aborting_; });
  }

  void abort(const std::string& why) noexcept override { end(why.empty() ? "aborted" : why); }

  void check() override {
    const std::lock_guard lock(lock_);
    if (!is_connecting_) pending_.clear();  // what connecting has begun it waits for itself
    refuse_if_ended();
  }

  void begin_to_connect(device::Executor& executor) override {
    await_connections();
    {
      const std::lock_guard lock(lock_);
      is_connecting_ = true;
    }
    connecting_ = std::thread([this, &executor] {
      try {
        executor.make_current();
        connect(executor.queue());
        executor.synchronize();
      } catch (const std::exception& error) {
        end(error.what());  // what the next call will say
      }
      const std::lock_guard lock(lock_);
      is_connecting_ = false, pending_.clear();
    });
  }

  void begin_step(bool is_limited) override {
    await_connections();
    const std::lock_guard lock(lock_);
    refuse_if_ended();
    pending_.begin_step(is_limited);
  }
  void end_step() override { check(); }

 protected:
  // One call of NCCL for few bytes; for many, shares.
  void do_all_reduce(const TensorView& in, const TensorView& out, device::Queue& queue) override {
    await_connections();
    const int64_t count = in.shape.num_elements();
    int64_t done = 0;
    if (in.num_bytes() >= kNcclShareBytes) {
      const int64_t share = count / world();
      const TensorView own = part_of(out, rank() * share, share);
      // Parts of a sum in place are read by the exchange before the sum of this rank's share is written.
      sum_shares(part_of(in, 0, share * world()), own, queue);
      call("all_reduce", queue, [&](void* comm, void* stream) {
        return library_.all_gather(own.data, out.data, static_cast<size_t>(own.num_bytes()), kNcclBytes, comm, stream);
      });
      done = share * world();
    }
    for (const int64_t piece = most_elements(in.dtype); done < count; done += piece) {
      const int64_t part = std::min(piece, count - done);
      call("all_reduce", queue, [&](void* comm, void* stream) {
        return library_.all_gather(at(in, done), scratch_.data(), static_cast<size_t>(part * width_of(in.dtype)),
                                   kNcclBytes, comm, stream);
      });
      sum_ranks(scratch_.data(), in.dtype, world(), part, at(out, done), out.dtype, part, queue);
    }
  }

  void do_all_gather(const TensorView& in, const TensorView& out, device::Queue& queue) override {
    await_connections();
    call("all_gather", queue, [&](void* comm, void* stream) {
      return library_.all_gather(in.data, out.data, static_cast<size_t>(in.num_bytes()), kNcclBytes, comm, stream);
    });
  }

  void do_gather_together(std::span<const Gathered> arrays, device::Queue& queue) override {
    await_connections();
    call_group("all_gather", queue, [&](void* comm, void* stream, auto&& note) {
      for (const auto& [in, out] : arrays) {
        note(library_.all_gather(in.data, out.data, static_cast<size_t>(in.num_bytes()), kNcclBytes, comm, stream));
      }
    });
  }

  void do_reduce_scatter(const TensorView& in, const TensorView& out, device::Queue& queue) override {
    await_connections();
    sum_shares(in, out, queue);
  }

  void do_all_to_all(const Runs& send, const Runs& receive, device::Queue& queue) override {
    await_connections();
    call_group("all_to_all", queue, [&](void* comm, void* stream, auto&& note) {
      char *from = static_cast<char*>(send.data), *to = static_cast<char*>(receive.data);
      for (size_t r = 0; r < send.bytes.size(); ++r) {
        const size_t sent = static_cast<size_t>(send.bytes[r]), received = static_cast<size_t>(receive.bytes[r]);
        if (sent > 0) note(library_.send(from, sent, kNcclBytes, static_cast<int>(r), comm, stream));
        if (received > 0) note(library_.receive(to, received, kNcclBytes, static_cast<int>(r), comm, stream));
        from += sent, to += received;
      }
    });
  }

  void do_broadcast(const TensorView& data, int root, device::Queue& queue) override {
    await_connections();
    call("broadcast", queue, [&](void* comm, void* stream) {
      return library_.broadcast(data.data, data.data, static_cast<size_t>(data.num_bytes()), kNcclBytes, root, comm,
                                stream);
    });
  }

  void do_barrier(device::Queue& queue) override {
    await_connections();
    call("barrier", queue, [&](void* comm, void* stream) {
      return library_.all_gather(scratch_.as<char>(), scratch_.as<char>() + kBarrierBytes, 1, kNcclBytes, comm, stream);
    });
  }

 private:
  static constexpr int64_t kBarrierBytes = 16;

  // Elements of every rank that the scratch holds, a multiple of 16 bytes.
  int64_t most_elements(DType dtype) const {
    return static_cast<int64_t>(scratch_.size()) / world() / 16 * 16 / width_of(dtype);
  }

  void await_connections() {
    if (connecting_.joinable()) connecting_.join();
  }

  // NCCL connects for a kind of call, and of sends to a rank, when it first comes.
  void connect(device::Queue& queue) {
    call("connecting", queue, [&](void* comm, void* stream) {
      return library_.all_gather(scratch_.as<char>(), scratch_.as<char>() + kBarrierBytes, 1, kNcclBytes, comm, stream);
    });
    call_group("connecting", queue, [&](void* comm, void* stream, auto&& note) {
      for (int r = 0; r < world(); ++r) {
        note(library_.send(scratch_.as<char>(), 1, kNcclBytes, r, comm, stream));
        note(library_.receive(scratch_.as<char>() + (1 + r) * kBarrierBytes, 1, kNcclBytes, r, comm, stream));
      }
    });
  }

  // in [world, share] of every rank -> out [share], the sum of this rank's place.
  void sum_shares(const TensorView& in, const TensorView& out, device::Queue& queue) {
    const int64_t share = out.shape.num_elements(), piece = most_elements(in.dtype), width = width_of(in.dtype);
    for (int64_t done = 0; done < share; done += piece) {
      const int64_t part = std::min(piece, share - done);
      const size_t bytes = static_cast<size_t>(part * width);
      call_group("reduce_scatter", queue, [&](void* comm, void* stream, auto&& note) {
        for (int r = 0; r < world(); ++r) {
          note(library_.send(at(in, r * share + done), bytes, kNcclBytes, r, comm, stream));
          note(library_.receive(scratch_.as<char>() + r * part * width, bytes, kNcclBytes, r, comm, stream));
        }
      });
      sum_ranks(scratch_.data(), in.dtype, world(), part, at(out, done), out.dtype, part, queue);
    }
  }

  template <class Function>
  void call(const char* what, device::Queue& queue, const Function& function) {
    int code = kNcclSuccess;
    {
      const Use use(*this, what);
      code = function(use.comm(), queue.stream());
    }
    finish(code, what, pending_.limit_seconds());
  }

  // The first error of a group counts; the group is closed in any case.
  template <class Function>
  void call_group(const char* what, device::Queue& queue, const Function& function) {
    int first = kNcclSuccess;
    {
      const Use use(*this, what);
      const auto note = [&](int code) {
        if (first == kNcclSuccess && code != kNcclInProgress) first = code;
      };
      note(library_.group_start());
      function(use.comm(), queue.stream(), note);
      const int end_code = library_.group_end();
      if (first == kNcclSuccess) first = end_code;
    }
    finish(first, what, pending_.limit_seconds());
  }

  // NCCL's handle for the calls of one collective. Who aborts waits until nobody has it, as long as that can take:
  // calls of a communicator that does not block return soon, and one that does not is what aborting is for.
  class Use {
   public:
    Use(Nccl& owner, const char* what) : owner_(owner) {
      const std::lock_guard lock(owner.lock_);
      owner.refuse_if_ended();
      owner.pending_.begin_call(what);
      ++owner.num_inside_;
      comm_ = owner.comm_;
    }
    ~Use() {
      const std::lock_guard lock(owner_.lock_);
      --owner_.num_inside_;
      owner_.changed_.notify_all();
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    void* comm() const { return comm_; }

   private:
    Nccl& owner_;
    void* comm_ = nullptr;
  };

  // A communicator that does not block says "in progress" where it goes on in a thread of its own.
  void finish(int code, const char* what, double seconds) {
    const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
    while (code == kNcclInProgress && Clock::now() < deadline) {
      {
        const std::lock_guard lock(lock_);
        refuse_if_ended();
        const int asked = library_.comm_get_async_error(comm_, &code);
        if (asked != kNcclSuccess) code = asked;
      }
      if (code == kNcclInProgress) std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    if (code == kNcclSuccess) return;
    const std::lock_guard lock(lock_);
    refuse_if_ended();
    fail(ErrorCode::kDeviceError, code == kNcclInProgress ? fmt::format("rank {} of {}: {} did not end within {:.3g} s",
                                                                        rank(), world(), what, seconds)
                                                          : described(code, what));
  }

  std::string described(int code, const char* what) const {
    return fmt::format("rank {} of {}: {}: NCCL: {}", rank(), world(), what, library_.get_error_string(code));
  }

  void watch() {
    std::unique_lock lock(lock_);
    while (!is_ending_ && comm_ != nullptr) {
      changed_.wait_for(lock, kWatchTime);
      if (is_ending_ || comm_ == nullptr) return;
      int code = kNcclSuccess;
      const int asked = library_.comm_get_async_error(comm_, &code);
      if (asked != kNcclSuccess) code = asked;
      if (code != kNcclSuccess && code != kNcclInProgress) return end_locked(lock, described(code, pending_.what()));
      if (pending_.is_over()) return end_locked(lock, pending_.stalled(rank(), world()));
    }
  }

  void end(const std::string& why) {
    std::unique_lock lock(lock_);
    end_locked(lock, why);
  }
  // Everybody is refused from here on. The abort itself holds no lock: it may wait for recordings that have the
  // communicator, and those are given back by somebody who is refused first.
  void end_locked(std::unique_lock<std::mutex>& lock, const std::string& why) {
    if (why_ended_.empty()) why_ended_ = why;
    void* comm = std::exchange(comm_, nullptr);
    if (comm == nullptr) return;
    is_aborting_ = true;
    changed_.wait_for(lock, kInsideTime, [this] { return num_inside_ == 0; });
    lock.unlock();
    library_.comm_abort(comm);
    lock.lock();
    is_aborting_ = false;
    changed_.notify_all();
  }
  void refuse_if_ended() const {
    if (comm_ == nullptr) fail(ErrorCode::kDeviceError, why_ended_);
  }

  const NcclLibrary& library_;
  device::Buffer scratch_;
  std::mutex lock_;
  std::condition_variable changed_;
  void* comm_ = nullptr;  // null: ended
  PendingCall pending_;   // since check()
  std::string why_ended_;
  int num_inside_ = 0;  // calls that have the handle
  bool is_ending_ = false, is_aborting_ = false, is_connecting_ = false;
  std::thread watchdog_, connecting_;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl(Bootstrap& bootstrap, device::MemorySpace& memory, const NcclOptions& options) {
  const NcclLibrary& library = nccl_library(options.library);
  NcclIdentity identity{};
  if (bootstrap.rank() == 0) {
    const int code = library.get_unique_id(&identity);
    if (code != kNcclSuccess) {
      fail(ErrorCode::kDeviceError, fmt::format("ncclGetUniqueId: {}", library.get_error_string(code)));
    }
  }
  const auto* bytes = reinterpret_cast<const uint8_t*>(identity.bytes);
  const std::vector<uint8_t> shared = bootstrap.broadcast({bytes, sizeof(identity.bytes)});
  if (shared.size() != sizeof(identity.bytes)) {
    fail_data("message", "NCCL's identity", fmt::format("{} bytes", sizeof(identity.bytes)),
              fmt::format("{}", shared.size()));
  }
  std::memcpy(identity.bytes, shared.data(), shared.size());
  return std::make_unique<Nccl>(library, identity, bootstrap.rank(), bootstrap.world(), memory, options);
}

}  // namespace tessera::comm
