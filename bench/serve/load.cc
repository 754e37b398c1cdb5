// SPDX-License-Identifier: Apache-2.0
#include "bench/serve/load.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>

#include "base/error.h"
#include "base/json.h"
#include "bench/ops/timing.h"
#include "bench/serve/response_reader.h"

namespace tessera::bench {

namespace {

// A refused or failed request of a closed load is followed by the next one after this, or after Retry-After if that is
// sooner than kMaxPause.
constexpr double kPause = 0.05, kMaxPause = 1;
constexpr double kLook = 0.1;
constexpr size_t kErrorBytes = 2000;
constexpr uint64_t kArrivalStream = ~uint64_t{0};

// One request and its connection.
struct Exchange {
  size_t record = 0;
  int fd = -1;
  std::string request;
  size_t num_sent = 0;
  ResponseReader response;
  EventReader events;
  std::string error_body;
  bool is_done = false;  // [DONE] came

  ~Exchange() {
    if (fd >= 0) close(fd);
  }
};

// What one event of a stream says.
void read_event(const std::string& data, double now, RequestRecord& record) {
  const Json json = Json::parse_exact(data, "event");
  if (const Json* error = json.find("error")) {
    const Json* message = error->find("message");
    record.error = "error in the stream: " + (message != nullptr ? message->string() : data.substr(0, kErrorBytes));
  }
  if (const Json* choices = json.find("choices")) {
    for (const Json& choice : choices->array()) {
      const Json* delta = choice.find("delta");
      size_t num_bytes = 0;
      for (const char* name : {"text", "content", "reasoning_content"}) {
        const Json* text = delta != nullptr ? delta->find(name) : choice.find(name);
        num_bytes += text != nullptr ? text->string().size() : 0;
      }
      if (num_bytes == 0) continue;
      const int64_t before = record.text_bytes.empty() ? 0 : record.text_bytes.back();
      record.texts.push_back(now);
      record.text_bytes.push_back(before + static_cast<int64_t>(num_bytes));
    }
  }
  const Json* usage = json.find("usage");
  if (usage == nullptr || usage->kind() != Json::Kind::kObject) return;
  const auto count = [](const Json* of, const char* name) {
    const Json* value = of != nullptr ? of->find(name) : nullptr;
    return value != nullptr ? value->integer() : 0;
  };
  record.prompt_tokens = count(usage, "prompt_tokens");
  record.output_tokens = count(usage, "completion_tokens");
  record.cached_tokens = count(usage->find("prompt_tokens_details"), "cached_tokens");
}

class Load {
 public:
  Load(const Address& address, const Workload& workload, const std::string& key, const LoadPoint& point,
       const LoadLimits& limits, uint64_t seed, LoadObserver& observer)
      : address_(address),
        workload_(workload),
        key_(key),
        limits_(limits),
        observer_(observer),
        arrivals_(seed, kArrivalStream),
        epoll_(epoll_create1(EPOLL_CLOEXEC)),
        timer_(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)) {
    result_.point = point;
    if (epoll_ < 0 || timer_ < 0) fail(ErrorCode::kResourceExhausted, fmt::format("epoll: {}", std::strerror(errno)));
    watch(timer_, EPOLLIN, EPOLL_CTL_ADD);
  }
  ~Load() {
    close(epoll_);
    close(timer_);
  }
  Load(const Load&) = delete;
  Load& operator=(const Load&) = delete;

  LoadResult run() {
    const double begin = seconds_now();
    sends_until_ = begin + limits_.seconds;
    // Those of a closed load are due at once, those of an open one come one after the other.
    const int64_t num_slots = result_.point.is_open() ? 1 : std::min(result_.point.concurrency, limits_.num_requests);
    for (int64_t i = 0; i < num_slots; ++i) due_.push_back(begin);
    double next_look = begin;
    while (!due_.empty() || !open_.empty()) {
      const double now = seconds_now();
      if (now >= next_look) {
        next_look = now + kLook;
        if (observer_.stops()) {
          result_.was_stopped = true;
          while (!open_.empty()) end(*open_.begin()->second, "given up");
          break;
        }
        end_late_ones(now);
      }
      send_due(now);
      wait(next_look);
    }
    result_.seconds = last_end_ - begin;
    return std::move(result_);
  }

 private:
  void watch(int fd, uint32_t what, int how) const {
    epoll_event event{};
    event.events = what;
    event.data.fd = fd;
    if (epoll_ctl(epoll_, how, fd, &event) != 0) {
      fail(ErrorCode::kResourceExhausted, fmt::format("epoll: {}", std::strerror(errno)));
    }
  }

  // Sends what is due; nothing more is once a limit is reached.
  void send_due(double now) {
    std::vector<double> later;
    for (const double due : std::exchange(due_, {})) {
      const bool is_over = static_cast<int64_t>(result_.records.size()) >= limits_.num_requests || due > sends_until_;
      if (is_over) continue;
      if (due > now) {
        later.push_back(due);
        continue;
      }
      if (result_.point.is_open()) {
        const double gap = -std::log1p(-static_cast<double>(arrivals_.uniform())) / result_.point.requests_per_second;
        later.push_back(due + gap);
      }
      send(due);
    }
    due_.insert(due_.end(), later.begin(), later.end());
  }

  void send(double due) {
    auto exchange = std::make_unique<Exchange>();
    exchange->record = result_.records.size();
    result_.records.emplace_back();
    result_.records.back().due = due;
    if (static_cast<int64_t>(open_.size()) >= limits_.max_connections) {
      return end(*exchange, fmt::format("not sent: {} were under way", open_.size()));
    }
    const BenchRequest asked = workload_.request(limits_.first_request + static_cast<int64_t>(exchange->record));
    exchange->request = request_bytes(address_, "POST", asked.path, key_, asked.body);
    try {
      exchange->fd = address_.connect();
    } catch (const std::exception& fault) {
      return end(*exchange, fault.what());
    }
    const int fd = exchange->fd;
    watch(fd, EPOLLIN | EPOLLOUT, EPOLL_CTL_ADD);
    open_[fd] = std::move(exchange);
  }

  // Until something comes, something is due, or it is time to look around.
  void wait(double next_look) {
    double until = next_look;
    for (const double due : due_) until = std::min(until, due);
    itimerspec at{};
    const double whole = std::floor(until);
    at.it_value.tv_sec = static_cast<time_t>(whole);
    at.it_value.tv_nsec = static_cast<long>((until - whole) * 1e9) + 1;
    timerfd_settime(timer_, TFD_TIMER_ABSTIME, &at, nullptr);
    std::array<epoll_event, 256> ready{};
    const int count = epoll_wait(epoll_, ready.data(), static_cast<int>(ready.size()), 1000);
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = ready[static_cast<size_t>(i)];
      const auto at_fd = open_.find(event.data.fd);
      if (at_fd == open_.end()) continue;
      Exchange& exchange = *at_fd->second;
      if ((event.events & EPOLLOUT) != 0 && !write(exchange)) continue;
      if ((event.events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) read(exchange);
    }
  }

  // False where that ended the exchange.
  bool write(Exchange& exchange) {
    const ssize_t count = ::send(exchange.fd, exchange.request.data() + exchange.num_sent,
                                 exchange.request.size() - exchange.num_sent, MSG_NOSIGNAL);
    if (count < 0) {
      if (errno == EAGAIN || errno == EINTR) return true;
      // A server that refuses before it has read all says why first.
      if (errno == EPIPE || errno == ECONNRESET) {
        watch(exchange.fd, EPOLLIN, EPOLL_CTL_MOD);
        return true;
      }
      end(exchange, fmt::format("sending: {}", std::strerror(errno)));
      return false;
    }
    exchange.num_sent += static_cast<size_t>(count);
    if (exchange.num_sent == exchange.request.size()) watch(exchange.fd, EPOLLIN, EPOLL_CTL_MOD);
    return true;
  }

  void read(Exchange& exchange) {
    std::array<char, 65536> bytes;
    const ssize_t count = recv(exchange.fd, bytes.data(), bytes.size(), 0);
    const double now = seconds_now();
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (count < 0) return end(exchange, fmt::format("connection: {}", std::strerror(errno)));
    RequestRecord& record = result_.records[exchange.record];
    try {
      if (count > 0) exchange.response.feed({bytes.data(), static_cast<size_t>(count)});
      record.status = exchange.response.status();
      if (record.status == 200) {
        exchange.events.feed(exchange.response.take_body());
        for (std::string data; exchange.events.next(data);) {
          if (data == "[DONE]") {
            exchange.is_done = true;
          } else {
            read_event(data, now, record);
          }
        }
      } else {
        exchange.error_body += exchange.response.take_body();
        exchange.error_body.resize(std::min(exchange.error_body.size(), kErrorBytes));
      }
    } catch (const Error& fault) {
      return end(exchange, fault.what());
    }
    if (count > 0 && !exchange.response.is_complete()) return;
    if (!exchange.response.finish()) return end(exchange, "the connection ended within the answer");
    std::string why = record.error;
    if (record.status != 200) {
      why = fmt::format("status {}: {}", record.status, exchange.error_body);
    } else if (!exchange.is_done && why.empty()) {
      why = "the stream ended without [DONE]";
    }
    end(exchange, why);
  }

  void end_late_ones(double now) {
    std::vector<Exchange*> late;
    for (const auto& [fd, exchange] : open_) {
      if (now - result_.records[exchange->record].due > limits_.answer_seconds) late.push_back(exchange.get());
    }
    for (Exchange* one : late) end(*one, fmt::format("not answered within {} s", limits_.answer_seconds));
  }

  // `exchange` is gone after it.
  void end(Exchange& exchange, const std::string& error) {
    RequestRecord& record = result_.records[exchange.record];
    record.error = error;
    last_end_ = record.end = seconds_now();
    if (!result_.point.is_open()) {
      double pause = 0;
      if (!error.empty()) {
        const std::string after(exchange.response.field("retry-after"));
        pause = std::clamp(after.empty() ? kPause : std::atof(after.c_str()), kPause, kMaxPause);
      }
      due_.push_back(record.end + pause);
    }
    observer_.ended(record);
    open_.erase(exchange.fd);
  }

  const Address& address_;
  const Workload& workload_;
  const std::string& key_;
  const LoadLimits limits_;
  LoadObserver& observer_;
  Rng arrivals_;
  const int epoll_, timer_;
  std::map<int, std::unique_ptr<Exchange>> open_;
  std::vector<double> due_;
  double sends_until_ = 0, last_end_ = 0;
  LoadResult result_;
};

}  // namespace

LoadResult run_load(const Address& address, const Workload& workload, const std::string& key, const LoadPoint& point,
                    const LoadLimits& limits, uint64_t seed, LoadObserver& observer) {
  return Load(address, workload, key, point, limits, seed, observer).run();
}

}  // namespace tessera::bench
