// SPDX-License-Identifier: Apache-2.0
#include "comm/joining.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>

#include <algorithm>
#include <map>
#include <thread>

#include "base/error.h"
#include "base/strings.h"

namespace tessera::comm {

namespace {

constexpr size_t kHandshakeBytes = 256;  // of a payload; only kLost's words come near
constexpr size_t kMostStrangers = 64;    // who have not said yet who they are
constexpr int kMostLines = 100;          // of the log about them
constexpr double kTellingSeconds = 5;    // for others to come, who learn that one has failed
constexpr auto kStrangerTime = std::chrono::seconds(5);
constexpr auto kRetryTime = std::chrono::milliseconds(100);

Clock::time_point after(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// An error says whose value it is, where somebody said it.
Socket listen_named(const std::string& address, int port, const std::string& source) try {
  return listen_at(address, port);
} catch (const Error& error) {
  const std::string name = error.code() == ErrorCode::kInvalidArgument ? source : "MASTER_PORT";
  fail(error.code(), name.empty() ? error.what() : fmt::format("{}: {}", name, error.what()));
}

Socket listen_for_ranks(const BootstrapOptions& options, LogSink* log) {
  const RankPlace& place = options.place;
  if (!options.listen_address.empty()) return listen_named(options.listen_address, place.port, options.listen_source);
  if (!leads_to_loopback(place.address)) return listen_named(place.address, place.port, place.address_source);
  if (log != nullptr) {
    log->write(LogLevel::kInfo, fmt::format("{} leads to this machine's loopback: listening on every network",
                                            printable(place.address, 80)));
  }
  return listen_named("*", place.port, place.address_source);
}

// Rank 0's side.
class Reception {
 public:
  Reception(const BootstrapOptions& options, LogSink* log, Socket listener)
      : options_(options),
        log_(log),
        listener_(listener.is_open() ? std::move(listener) : listen_for_ranks(options, log)),
        links_(static_cast<size_t>(options.place.world)),
        has_failed_(links_.size()) {}

  Links run() {
    wait_for_all();
    if (!failure_.empty()) give_up(static_cast<int>(failed_), failure_);
    for (auto& link : links_) {
      if (link != nullptr) link->send(MessageKind::kReady, {});
    }
    return std::move(links_);
  }

  // In place of it, for a rank 0 that can't go on: those who come learn why.
  void fail_with(const std::string& message) {
    note_failure(0, message);
    wait_for_all();
    tell_all(0, failure_);
  }

 private:
  struct Stranger {
    std::unique_ptr<Connection> connection;  // null: done with
    Nonce nonce;
    Clock::time_point deadline;
  };

  // Where one has failed, no longer than for others to hear of it.
  void wait_for_all() {
    while (!missing().empty()) {
      if (Clock::now() > deadline_) {
        if (!failure_.empty()) return;
        give_up(first_missing(), fmt::format("rank{} {} of {} did not come to {} port {} within {:.3g} s",
                                             missing().size() > 1 ? "s" : "", fmt::join(missing(), ", "), links_.size(),
                                             options_.place.address, port_of(listener_), options_.join_seconds));
      }
      wait();
      // Before it is said that one has gone, which may be of this.
      if (const std::string why = options_.watch != nullptr ? options_.watch->fault() : ""; !why.empty()) {
        if (!failure_.empty()) return;  // which came first
        give_up(first_missing(), why);
      }
      for (size_t n = 0; n < kMostStrangers && greet(); ++n) {
      }
      for (Stranger& stranger : strangers_) hear(stranger);
      std::erase_if(strangers_, [](const Stranger& stranger) { return stranger.connection == nullptr; });
      free_places();
    }
  }

  std::vector<size_t> missing() const {
    std::vector<size_t> ranks;
    for (size_t r = 1; r < links_.size(); ++r) {
      if (links_[r] == nullptr && !has_failed_[r]) ranks.push_back(r);
    }
    return ranks;
  }

  int first_missing() const { return static_cast<int>(missing().front()); }

  void tell_all(int rank, const std::string& why) {
    for (auto& link : links_) {
      if (link != nullptr) link->send(MessageKind::kLost, lost_payload(rank, why));
    }
  }

  // Those who are there learn why, too.
  [[noreturn]] void give_up(int rank, const std::string& why) {
    tell_all(rank, why);
    fail(ErrorCode::kDeviceError, why);
  }

  // So that whoever gives up first knows for whom it waited.
  void say_who_is_missing() {
    const std::string text = fmt::format("{}", fmt::join(missing(), ", "));
    for (auto& link : links_) {
      if (link == nullptr) continue;
      link->send(MessageKind::kWaiting, {reinterpret_cast<const uint8_t*>(text.data()), text.size()});
    }
  }

  void wait() const {
    std::vector<pollfd> waits{{listener_.descriptor(), POLLIN, 0}};
    for (const Stranger& stranger : strangers_) waits.push_back({stranger.connection->descriptor(), POLLIN, 0});
    for (const auto& link : links_) {
      if (link != nullptr) waits.push_back({link->descriptor(), POLLIN, 0});
    }
    ::poll(waits.data(), waits.size(), 50);
  }

  // Before all are there a rank says nothing, but why it can't go on; empty: nothing. Throws for what no rank has sent.
  static std::string failure_of(Connection& link) {
    Message message;
    int rank = 0;
    const bool has_failed = link.next(message) && message.kind == MessageKind::kLost;
    return has_failed ? lost_message(message.payload, rank) : "";
  }

  // False: it has gone.
  bool hear_admitted(size_t rank) {
    std::string why;
    bool is_open = false;
    try {
      is_open = links_[rank]->fill();
      why = failure_of(*links_[rank]);
    } catch (const Error&) {
      return false;
    }
    if (why.empty()) return is_open;
    links_[rank].reset();
    note_failure(rank, why);
    return true;
  }

  // All end with the first one's words. Who comes later would find nobody, and wait.
  void note_failure(size_t rank, const std::string& why) {
    has_failed_[rank] = true;
    if (failure_.empty()) failed_ = rank, failure_ = why, deadline_ = std::min(deadline_, after(kTellingSeconds));
  }

  // Of ranks that have gone again: who is started anew finds its place free.
  void free_places() {
    for (size_t r = 1; r < links_.size(); ++r) {
      if (links_[r] == nullptr || hear_admitted(r)) continue;
      if (log_ != nullptr) {
        log_->write(LogLevel::kWarning,
                    fmt::format("rank {} ({}) has gone before all were there", r, links_[r]->peer()));
      }
      links_[r].reset();
      say_who_is_missing();
    }
  }

  static std::string host_of(const Stranger& stranger) {
    const std::string& peer = stranger.connection->peer();
    return peer.substr(0, peer.rfind(" port "));
  }

  // The oldest of the address that has the most: nobody fills the places of others.
  void make_place() {
    if (strangers_.size() < kMostStrangers) return;
    std::map<std::string, size_t> counts;
    for (const Stranger& stranger : strangers_) ++counts[host_of(stranger)];
    const auto more = [](const auto& a, const auto& b) { return a.second < b.second; };
    const std::string most = std::max_element(counts.begin(), counts.end(), more)->first;
    const auto oldest = std::find_if(strangers_.begin(), strangers_.end(),
                                     [&](const Stranger& stranger) { return host_of(stranger) == most; });
    drop(*oldest, "too many connections from there have not said which rank they are");
    strangers_.erase(oldest);
  }

  // False: nobody is there.
  bool greet() {
    std::string peer;
    Socket socket = accept_one(listener_, peer);
    if (!socket.is_open()) return false;
    make_place();
    const Nonce nonce = random_nonce();
    auto connection =
        std::make_unique<Connection>(std::move(socket), peer, challenge_key(), Direction::kFromRoot, kHandshakeBytes);
    connection->send(MessageKind::kChallenge, nonce);
    connection->set_key(hello_key(options_.secret, nonce), kHandshakeBytes);
    strangers_.push_back({std::move(connection), nonce, Clock::now() + kStrangerTime});
    return true;
  }

  void drop(Stranger& stranger, std::string_view why) {
    if (log_ != nullptr && num_lines_ < kMostLines) {
      log_->write(LogLevel::kWarning, fmt::format("dropped a connection from {}: {}{}", stranger.connection->peer(),
                                                  why, ++num_lines_ == kMostLines ? " (more are not said)" : ""));
    }
    stranger.connection.reset();
  }

  void hear(Stranger& stranger) {
    try {
      Message message;
      const bool is_open = stranger.connection->fill();
      if (stranger.connection->next(message)) return admit(stranger, message);
      if (!is_open) return drop(stranger, "closed before it said which rank it is");
      if (Clock::now() > stranger.deadline) drop(stranger, "did not say in time which rank it is");
    } catch (const Error& error) {
      drop(stranger, error.what());
    }
  }

  void admit(Stranger& stranger, const Message& message) {
    size_t at = sizeof(Nonce);
    if (message.kind != MessageKind::kHello || message.payload.size() != sizeof(Nonce) + 8) {
      return drop(stranger, "expected a rank's first message, found another");
    }
    const uint32_t rank = read_u32(message.payload, at), world = read_u32(message.payload, at);
    Connection& connection = *stranger.connection;
    connection.set_key(session_key(options_.secret, stranger.nonce, std::span(message.payload).first(sizeof(Nonce))));
    std::string why;
    if (world != links_.size()) {
      why = fmt::format("rank {} is one of {}, rank 0 one of {}", rank, world, links_.size());
    } else if (rank == 0 || rank >= world) {
      why = fmt::format("rank {} where 1 to {} are expected", rank, world - 1);
    } else if (links_[rank] != nullptr) {
      why = fmt::format("rank {} is there already, from {}", rank, links_[rank]->peer());
    }
    if (!why.empty()) {
      connection.send(MessageKind::kLost, lost_payload(static_cast<int>(rank), why));
      return drop(stranger, why);
    }
    connection.send(MessageKind::kWelcome, {});
    links_[rank] = std::move(stranger.connection);
    say_who_is_missing();
  }

  const BootstrapOptions& options_;
  LogSink* log_;
  Socket listener_;
  Links links_;
  std::vector<Stranger> strangers_;
  Clock::time_point deadline_ = after(options_.join_seconds);
  std::vector<bool> has_failed_;  // who said that it can't go on
  size_t failed_ = 0;             // the first of them, and why
  std::string failure_;
  int num_lines_ = 0;
};

// Everybody else's.
class Visit {
 public:
  explicit Visit(const BootstrapOptions& options) : options_(options), deadline_(after(options.join_seconds)) {}

  Links run() {
    std::unique_ptr<Connection> link = come_in();
    receive(*link, MessageKind::kReady, "word that all ranks are there");
    Links links(static_cast<size_t>(options_.place.world));
    links[0] = std::move(link);
    return links;
  }

  void fail_with(const std::string& message) {
    const std::unique_ptr<Connection> link = come_in();
    link->send(MessageKind::kLost, lost_payload(options_.place.rank, message));
    while (link->wants_to_write() && Clock::now() < deadline_ && link->flush()) wait_for(*link, POLLOUT);
    link->end_sending();
    // Closing with bytes unread would throw away what is under way.
    for (; link->fill() && Clock::now() < deadline_; link->forget_heard()) wait_for(*link, POLLIN);
  }

 private:
  // As far as rank 0's welcome.
  std::unique_ptr<Connection> come_in() {
    const RankPlace& place = options_.place;
    Message challenge;
    std::unique_ptr<Connection> link = reach_challenge(challenge);
    if (challenge.payload.size() != sizeof(Nonce)) fail_root("its challenge has another size");
    const Nonce nonce = random_nonce();
    std::vector<uint8_t> hello(nonce.begin(), nonce.end());
    append_u32(hello, static_cast<uint32_t>(place.rank));
    append_u32(hello, static_cast<uint32_t>(place.world));
    link->set_key(hello_key(options_.secret, challenge.payload), kHandshakeBytes);
    link->send(MessageKind::kHello, hello);
    link->set_key(session_key(options_.secret, challenge.payload, nonce));
    receive(*link, MessageKind::kWelcome, "its welcome (do both know the same secret?)");
    return link;
  }

  [[noreturn]] void fail_root(const std::string& why) const {
    fail(ErrorCode::kDeviceError,
         fmt::format("rank 0 at {} port {}: {}", printable(options_.place.address, 80), options_.place.port, why));
  }

  std::unique_ptr<Connection> reach_root() const {
    const RankPlace& place = options_.place;
    std::string why = "nobody there";
    while (Clock::now() < deadline_) {
      Socket socket = connect_to(place.address, place.port, 1000, why);
      if (socket.is_open()) {
        return std::make_unique<Connection>(std::move(socket), fmt::format("{} port {}", place.address, place.port),
                                            challenge_key(), Direction::kToRoot, kHandshakeBytes);
      }
      std::this_thread::sleep_for(kRetryTime);
    }
    fail_root(fmt::format("{}, for {:.3g} s{}", why, options_.join_seconds,
                          place.address_source.empty() ? "" : fmt::format(" ({} says where)", place.address_source)));
  }

  // Rank 0 may have no place for a moment, or something else may have had its port: one more try.
  std::unique_ptr<Connection> reach_challenge(Message& challenge) {
    while (true) {
      std::unique_ptr<Connection> link = reach_root();
      try {
        challenge = receive(*link, MessageKind::kChallenge, "its challenge");
        return link;
      } catch (const Error&) {
        if (!is_closed_ || Clock::now() > deadline_) throw;
      }
      std::this_thread::sleep_for(kRetryTime);
    }
  }

  static void wait_for(const Connection& link, short events) {
    pollfd wait{link.descriptor(), events, 0};
    ::poll(&wait, 1, 50);
  }

  Message receive(Connection& link, MessageKind kind, const char* what) {
    Message message;
    while (true) {
      is_closed_ = false;
      try {
        const bool is_open = link.fill();
        if (link.next(message)) {
          // Who has not proved that it knows the secret says nothing else.
          if (message.kind != MessageKind::kWaiting || kind != MessageKind::kReady) break;
          missing_ = printable(std::string(message.payload.begin(), message.payload.end()), 200);
          if (Clock::now() <= deadline_) continue;
        }
        is_closed_ = !is_open;
        if (!is_open) fail_root(fmt::format("closed the connection before {}", what));
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kDataLoss) throw;
        fail_root(error.what());
      }
      if (Clock::now() > deadline_) {
        const std::string who =
            missing_.empty() ? "" : fmt::format("; of {} ranks it misses {}", options_.place.world, missing_);
        fail_root(fmt::format("did not send {} in time{}", what, who));
      }
      wait_for(link, POLLIN);
    }
    int rank = 0;
    const bool is_genuine = kind != MessageKind::kChallenge;  // sealed by the secret
    if (message.kind == MessageKind::kLost && is_genuine) fail_root(lost_message(message.payload, rank));
    if (message.kind != kind) fail_root(fmt::format("expected {}, found another message", what));
    return message;
  }

  const BootstrapOptions& options_;
  const Clock::time_point deadline_;
  std::string missing_;  // ranks, as rank 0 said last
  bool is_closed_ = false;
};

void check_secret(const BootstrapOptions& options) {
  if (options.secret.size() < kLeastSecretBytes) {
    fail(ErrorCode::kInvalidArgument, fmt::format("the ranks' secret: expected at least {} characters, found {}",
                                                  kLeastSecretBytes, options.secret.size()));
  }
}

}  // namespace

Links join_ranks(const BootstrapOptions& options, LogSink* log, Socket listener) {
  const RankPlace& place = options.place;
  check_secret(options);
  if (place.world == 1) return Links(1);
  return place.rank == 0 ? Reception(options, log, std::move(listener)).run() : Visit(options).run();
}

void tell_of_failure(const BootstrapOptions& options, const std::string& message) {
  check_secret(options);
  if (options.place.rank == 0) return Reception(options, nullptr, {}).fail_with(message);
  Visit(options).fail_with(message);
}

std::vector<uint8_t> lost_payload(int rank, std::string_view message) {
  std::vector<uint8_t> payload;
  append_u32(payload, static_cast<uint32_t>(rank));
  payload.insert(payload.end(), message.begin(), message.end());
  return payload;
}

std::string lost_message(std::span<const uint8_t> payload, int& rank) {
  size_t at = 0;
  rank = static_cast<int>(read_u32(payload, at));
  return printable(std::string(payload.begin() + static_cast<ptrdiff_t>(at), payload.end()));
}

}  // namespace tessera::comm
