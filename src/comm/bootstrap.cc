// SPDX-License-Identifier: Apache-2.0
#include "comm/bootstrap.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "comm/connection.h"
#include "comm/joining.h"

namespace tessera::comm {

std::string failed_rank(int rank, size_t world) {
  return fmt::format("rank {} of {} failed: ", rank, world);
}

namespace {

constexpr double kEndingSeconds = 5;                    // of silence
constexpr auto kLeavingTime = std::chrono::seconds(2);  // for the others to read last words

std::span<const uint8_t> no_bytes() {
  return {};
}

}  // namespace

void tell_others(const BootstrapOptions& options, const std::string& why) noexcept {
  try {
    tell_of_failure(options, failed_rank(options.place.rank, static_cast<size_t>(options.place.world)) + why);
  } catch (const std::exception&) {
    // They wait as for one that was killed.
  }
}

// Connections, the thread that serves them, and what came through them. Everything but options_ is under lock_.
class Bootstrap::Member {
 public:
  Member(const BootstrapOptions& options, LogSink* log, LossSink* sink, Socket listener)
      : options_(options),
        sink_(sink),
        links_(join_ranks(options, log, std::move(listener))),
        inbox_(links_.size()),
        has_left_(links_.size()) {
    wake_ = Socket(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    TESSERA_CHECK(wake_.is_open(), "eventfd");
    for (const auto& link : links_) {
      if (link != nullptr) link->restart_silence();
    }
    last_beat_ = Clock::now();
    thread_ = std::thread([this] { serve(); });
  }

  ~Member() { leave(); }

  const RankPlace& place() const { return options_.place; }

  std::vector<std::vector<uint8_t>> all_gather(std::span<const uint8_t> bytes, double limit_seconds) {
    const size_t world = links_.size();
    if (bytes.size() * world + 4 * world > kMaxPayloadBytes) {
      tessera::fail(ErrorCode::kInvalidArgument,
                    fmt::format("all_gather of {} bytes from each of {} ranks: at most {} in all", bytes.size(), world,
                                kMaxPayloadBytes));
    }
    std::unique_lock lock(lock_);
    if (place().rank != 0) {
      refuse_if_ended();
      if (links_[0] == nullptr) refuse_left(0);
      send(0, MessageKind::kData, bytes);
      // Rank 0 knows who is missing, and says so first.
      return unpack(take(lock, inbox_[0], 0, 1.5 * limit_seconds));
    }
    std::vector<std::vector<uint8_t>> all(world);
    all[0].assign(bytes.begin(), bytes.end());
    const Clock::time_point begin = Clock::now();  // the limit is one for all
    for (size_t r = 1; r < world; ++r) all[r] = take(lock, inbox_[r], r, limit_seconds, begin);
    const std::vector<uint8_t> packed = pack(all);
    for (size_t r = 1; r < world; ++r) send(r, MessageKind::kData, packed);
    return all;
  }

  void send_order(std::span<const uint8_t> bytes) {
    const std::lock_guard lock(lock_);
    refuse_if_ended();
    for (size_t r = 1; r < links_.size(); ++r) {
      if (links_[r] == nullptr) refuse_left(r);
      send(r, MessageKind::kOrder, bytes);
    }
    ++num_orders_;
  }

  std::vector<uint8_t> take_order(double limit_seconds) {
    std::unique_lock lock(lock_);
    std::vector<uint8_t> order = take(lock, orders_, 0, limit_seconds);
    ++num_orders_;
    return order;
  }

  uint64_t num_orders() {
    const std::lock_guard lock(lock_);
    return num_orders_;
  }

  void check() {
    const std::lock_guard lock(lock_);
    refuse_if_ended();
  }

  void fail_with(const std::string& why) {
    {
      const std::lock_guard lock(lock_);
      if (lost_.empty() && !is_leaving_) {
        const int self = place().rank;
        const std::string message = failed_rank(self, links_.size()) + why;
        tell(links_.size(), self, message);
        end(self, message);
      }
      leave_locked();
    }
    join();
  }

  // The thread has ended: it tells no more. It keeps silent where this rank left before it came to that.
  void tell_sink() {
    if (sink_ == nullptr || is_told_ || lost_.empty()) return;
    is_told_ = true;
    sink_->lost(lost_rank_, lost_);
  }

  void leave() {
    {
      const std::lock_guard lock(lock_);
      if (!is_leaving_ && lost_.empty()) {
        for (size_t r = 0; r < links_.size(); ++r) send(r, MessageKind::kFarewell, no_bytes());
      }
      leave_locked();
    }
    join();
  }

 private:
  void leave_locked() {
    if (is_leaving_) return;
    is_leaving_ = true;
    leaving_deadline_ = Clock::now() + kLeavingTime;
    wake();
  }
  // By whoever of several threads ends this first; the others wait for it.
  void join() {
    std::call_once(is_joined_, [&] { thread_.join(); });
  }

  std::string name_of(size_t rank, const Connection& link) const {
    return fmt::format("rank {} of {} ({})", rank, links_.size(), link.peer());
  }
  void wake() const {
    const uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_.descriptor(), &one, sizeof(one));
  }

  // A rank that has left gets nothing.
  void send(size_t rank, MessageKind kind, std::span<const uint8_t> payload) {
    if (links_[rank] == nullptr) return;
    links_[rank]->send(kind, payload);
    if (links_[rank]->wants_to_write()) wake();
  }

  void refuse_if_ended() const {
    if (!lost_.empty()) tessera::fail(ErrorCode::kDeviceError, lost_);
  }
  [[noreturn]] void refuse_left(size_t rank) const {
    tessera::fail(ErrorCode::kDeviceError, fmt::format("rank {} of {} has left", rank, links_.size()));
  }

  std::vector<uint8_t> take(std::unique_lock<std::mutex>& lock, std::deque<std::vector<uint8_t>>& box, size_t rank,
                            double limit_seconds, Clock::time_point begin = Clock::now()) {
    const auto is_over = [&] { return !box.empty() || !lost_.empty() || has_left_[rank] || is_leaving_; };
    if (limit_seconds <= 0) {
      changed_.wait(lock, is_over);
    } else if (!changed_.wait_until(lock, begin + std::chrono::duration<double>(limit_seconds), is_over)) {
      tessera::fail(ErrorCode::kDeviceError, fmt::format("rank {} of {} stalls: nothing came from it within {:.3g} s",
                                                         rank, links_.size(), limit_seconds));
    }
    if (box.empty()) refuse_if_ended();
    if (box.empty()) refuse_left(is_leaving_ ? static_cast<size_t>(place().rank) : rank);
    std::vector<uint8_t> bytes = std::move(box.front());
    box.pop_front();
    return bytes;
  }

  static std::vector<uint8_t> pack(const std::vector<std::vector<uint8_t>>& all) {
    std::vector<uint8_t> packed;
    for (const std::vector<uint8_t>& bytes : all) {
      append_u32(packed, static_cast<uint32_t>(bytes.size()));
      packed.insert(packed.end(), bytes.begin(), bytes.end());
    }
    return packed;
  }
  std::vector<std::vector<uint8_t>> unpack(const std::vector<uint8_t>& packed) const {
    std::vector<std::vector<uint8_t>> all;
    size_t at = 0;
    for (size_t r = 0; r < links_.size(); ++r) {
      const size_t size = read_u32(packed, at);
      if (size > packed.size() - at) fail_data("message", "payload", "bytes of every rank", "fewer");
      all.emplace_back(packed.begin() + static_cast<ptrdiff_t>(at), packed.begin() + static_cast<ptrdiff_t>(at + size));
      at += size;
    }
    return all;
  }

  // The thread: until nobody is left, this rank has left, or one is lost.
  void serve() {
    std::unique_lock lock(lock_);
    while (lost_.empty() && has_links()) {
      wait(lock);
      try {
        for (size_t r = 0; r < links_.size() && lost_.empty(); ++r) hear(r);
        beat();
      } catch (const std::exception& error) {  // such as no memory: it would end the process
        end(place().rank, failed_rank(place().rank, links_.size()) + error.what());
      }
      if (is_leaving_ && Clock::now() > leaving_deadline_) break;
    }
    if (!lost_.empty()) linger(lock);
    if (lost_.empty() || is_leaving_ || sink_ == nullptr) return;
    const int rank = lost_rank_;
    const std::string message = lost_;
    is_told_ = true;
    lock.unlock();
    sink_->lost(rank, message);
  }

  // Last words are read before this side closes: closing with bytes unread throws away what is under way.
  void linger(std::unique_lock<std::mutex>& lock) {
    const Clock::time_point deadline = Clock::now() + kLeavingTime;
    while (has_links() && Clock::now() < deadline) {
      for (auto& link : links_) {
        if (link == nullptr) continue;
        const bool is_open = link->flush() && link->fill();
        if (is_open && !link->wants_to_write()) link->end_sending();
        if (!is_open) link.reset();
        if (is_open) link->forget_heard();
      }
      if (has_links()) wait(lock);
    }
    for (auto& link : links_) link.reset();
  }

  bool has_links() const {
    return std::any_of(links_.begin(), links_.end(), [](const auto& link) { return link != nullptr; });
  }

  void wait(std::unique_lock<std::mutex>& lock) {
    std::vector<pollfd> waits{{wake_.descriptor(), POLLIN, 0}};
    for (const auto& link : links_) {
      if (link == nullptr) continue;
      const int events = POLLIN | (link->wants_to_write() ? POLLOUT : 0);
      waits.push_back({link->descriptor(), static_cast<short>(events), 0});
    }
    const int timeout_ms = std::max(1, static_cast<int>(options_.heartbeat_seconds * 1000 / 2));
    lock.unlock();
    ::poll(waits.data(), waits.size(), std::min(timeout_ms, 500));
    lock.lock();
    uint64_t count = 0;
    [[maybe_unused]] const auto read = ::read(wake_.descriptor(), &count, sizeof(count));
  }

  void hear(size_t rank) {
    if (links_[rank] == nullptr) return;
    Connection& link = *links_[rank];
    try {
      const bool is_open = link.fill(), is_sending = link.flush();
      Message message;
      while (links_[rank] != nullptr && link.next(message)) {
        if (!handle(rank, message)) return;
      }
      if (!is_open || !is_sending) {
        if (is_leaving_) return part(rank);
        return lose(rank, "closed the connection without a farewell: it has ended, or was cut off");
      }
    } catch (const Error& error) {
      return is_leaving_ ? part(rank) : lose(rank, error.what());
    }
    const std::chrono::duration<double> silence = Clock::now() - link.last_heard();
    if (!is_leaving_ && silence.count() > patience()) lose(rank, fmt::format("silent for {:.3g} s", silence.count()));
  }

  double patience() const {
    const bool is_ending = options_.is_ending != nullptr && *options_.is_ending;
    return is_ending ? std::min(kEndingSeconds, options_.lost_seconds) : options_.lost_seconds;
  }

  // False: the link is gone.
  bool handle(size_t rank, Message& message) {
    switch (message.kind) {
      case MessageKind::kData:
        inbox_[rank].push_back(std::move(message.payload));
        changed_.notify_all();
        return true;
      case MessageKind::kOrder:
        orders_.push_back(std::move(message.payload));
        changed_.notify_all();
        return true;
      case MessageKind::kFarewell:
        part(rank);
        return false;
      case MessageKind::kLost: {
        int lost_rank = 0;
        const std::string why = lost_message(message.payload, lost_rank);
        tell(rank, lost_rank, why);
        end(lost_rank, why);
        return false;
      }
      default:
        return true;  // a heartbeat was heard
    }
  }

  void part(size_t rank) {
    has_left_[rank] = true;
    links_[rank].reset();
    changed_.notify_all();
  }

  void lose(size_t rank, const std::string& why) {
    const std::string message = fmt::format("{}{}: {}", kLostRank, name_of(rank, *links_[rank]), why);
    links_[rank].reset();
    tell(rank, static_cast<int>(rank), message);
    end(static_cast<int>(rank), message);
  }

  // Everybody but `from`, who said so or who is meant.
  void tell(size_t from, int lost_rank, const std::string& message) {
    for (size_t r = 0; r < links_.size(); ++r) {
      if (r != from) send(r, MessageKind::kLost, lost_payload(lost_rank, message));
    }
  }

  void end(int rank, const std::string& message) {
    lost_ = message, lost_rank_ = rank;
    changed_.notify_all();
  }

  void beat() {
    const std::chrono::duration<double> since = Clock::now() - last_beat_;
    if (since.count() < options_.heartbeat_seconds) return;
    last_beat_ = Clock::now();
    for (size_t r = 0; r < links_.size(); ++r) send(r, MessageKind::kHeartbeat, no_bytes());
  }

  const BootstrapOptions options_;
  LossSink* sink_;
  std::mutex lock_;
  std::condition_variable changed_;
  Links links_;                                          // null: oneself, or one that has left
  std::vector<std::deque<std::vector<uint8_t>>> inbox_;  // kData by sender
  std::deque<std::vector<uint8_t>> orders_;              // of rank 0
  uint64_t num_orders_ = 0;                              // sent or taken
  std::vector<bool> has_left_;
  Socket wake_;
  Clock::time_point last_beat_, leaving_deadline_;
  std::string lost_;
  int lost_rank_ = -1;
  bool is_leaving_ = false, is_told_ = false;
  std::once_flag is_joined_;
  std::thread thread_;
};

Bootstrap::Bootstrap(const BootstrapOptions& options, LogSink* log, LossSink* sink, Socket listener)
    : member_(std::make_unique<Member>(options, log, sink, std::move(listener))) {}
Bootstrap::~Bootstrap() = default;

int Bootstrap::rank() const {
  return member_->place().rank;
}
int Bootstrap::world() const {
  return member_->place().world;
}

std::vector<std::vector<uint8_t>> Bootstrap::all_gather(std::span<const uint8_t> bytes, double limit_seconds) {
  return member_->all_gather(bytes, limit_seconds);
}

std::vector<uint8_t> Bootstrap::broadcast(std::span<const uint8_t> bytes) {
  return std::move(member_->all_gather(rank() == 0 ? bytes : no_bytes(), 0).front());
}

void Bootstrap::send_order(std::span<const uint8_t> bytes) {
  if (bytes.size() > kMaxPayloadBytes) {
    tessera::fail(ErrorCode::kInvalidArgument,
                  fmt::format("an order of {} bytes: at most {}", bytes.size(), kMaxPayloadBytes));
  }
  member_->send_order(bytes);
}

std::vector<uint8_t> Bootstrap::take_order(double limit_seconds) {
  return member_->take_order(limit_seconds);
}

uint64_t Bootstrap::num_orders() const {
  return member_->num_orders();
}

void Bootstrap::check() {
  member_->check();
}

void Bootstrap::fail(const std::string& why) noexcept {
  try {
    member_->fail_with(why);
  } catch (const std::exception&) {
    // The others see the connection close.
  }
}

void Bootstrap::end_group(const std::string& why) noexcept {
  fail(why);
  member_->tell_sink();
}

void Bootstrap::leave() {
  member_->leave();
}

}  // namespace tessera::comm
