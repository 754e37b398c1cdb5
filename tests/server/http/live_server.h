// SPDX-License-Identifier: Apache-2.0
#pragma once
// The whole server on a free port with a runner behind it, scripted or not, and a client that writes bytes as it likes.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "server/http/http_server.h"
#include "server/http/scripted_runner.h"
#include "text/chat/markers.h"

namespace tessera::server::http {

inline constexpr char kQuestion[] = R"("model":"tiny","messages":[{"role":"user","content":"Hello"}])";

struct LiveSetup {
  std::string answer = "one two three";
  std::vector<std::string> names = {"tiny"};  // of the model
  HttpOptions http{};
  engine::EngineOptions engine{};
  int64_t step_microseconds = 0;
  size_t max_preparing = ServiceOptions().max_preparing, max_compiling = ServiceOptions().max_compiling;
  bool loads = false;                              // until attach()
  std::vector<const engine::PrefixTier*> tiers{};  // asked for figures by /metrics alone
  LogSink* log = nullptr;
};

// The whole server around a runner that says what it says.
class ServedRunner {
 public:
  // Both outlive it. The runner's tokens are the tokenizer's, or the first of them: then there are no grammars.
  ServedRunner(const text::Tokenizer& tokenizer, model::Runner& runner, LiveSetup setup)
      : budget_(runner.cache_spec(), int64_t{1} << 30),
        grammars_(tokenizer, tokenizer.vocab_size(), runner.facts().eos_ids) {
    engine_ = std::make_unique<engine::Engine>(runner, budget_, setup.engine);
    Serving serving;
    serving.model.names = setup.names;
    serving.model.vocab_size = runner.facts().vocab_size;
    serving.model.max_model_len = std::min<int64_t>(1 << 15, runner.facts().max_positions);
    serving.tokenizer = &tokenizer;
    serving.bos_id = tokenizer.added_token(text::kBosToken).value();
    serving.eos_ids = {tokenizer.added_token(text::kEosToken).value()};
    serving.model.has_grammars = runner.facts().vocab_size == tokenizer.vocab_size();
    serving.grammars = serving.model.has_grammars ? &grammars_ : nullptr;
    serving.version = "0";
    ServiceOptions options;
    options.page = "<!doctype html>";
    options.max_preparing = setup.max_preparing, options.max_compiling = setup.max_compiling;
    options.tiers = setup.tiers;
    service_ = std::make_unique<Service>(std::move(serving), *engine_, figures_, std::move(options), setup.log);
    setup.http.port = 0;
    http_ = std::make_unique<HttpServer>(setup.http, figures_, nullptr, setup.log);
    if (!setup.loads) attach();
    thread_ = std::thread([this] {
      http_->run();
      has_ended_ = true;
    });
  }
  ~ServedRunner() {
    http_->drain();
    http_->drain();
    thread_.join();
    // As the program does it: once run() has returned, nothing of the server looks at either.
    service_.reset();
    engine_.reset();
    http_.reset();
  }

  uint16_t port() const { return http_->port(); }
  HttpServer& http() { return *http_; }
  engine::Engine& engine() { return *engine_; }
  Service& service() { return *service_; }
  void attach() { http_->attach(*service_); }
  // HttpServer::run() has returned.
  bool has_ended() const { return has_ended_; }
  // Waits until the engine has ended all requests and `is_empty()` says so too; false after ten seconds.
  template <class IsEmpty>
  bool becomes_idle(const IsEmpty& is_empty) const {
    for (int i = 0; i < 10000; ++i) {
      const engine::Totals totals = engine_->status().totals;
      const bool has_ended_all = totals.num_requests == totals.num_completed + totals.num_cancelled + totals.num_failed;
      if (has_ended_all && is_empty()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  }

 private:
  const engine::ReservedBudget budget_;
  text::GrammarCompiler grammars_;
  Figures figures_;
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<Service> service_;
  std::unique_ptr<HttpServer> http_;
  std::atomic<bool> has_ended_{false};
  std::thread thread_;
};

// The same around a scripted runner.
class LiveServer {
 public:
  using Setup = LiveSetup;

  explicit LiveServer(Setup setup = {})
      : tokenizer_(text::Tokenizer::load(TESSERA_SOURCE_DIR "/models/tiny-v4/tokenizer.json")),
        runner_(tokenizer_.encode(setup.answer), id_of(text::kAssistantToken),
                {id_of(text::kThinkToken), id_of(text::kEndThinkToken)}, id_of(text::kEosToken),
                tokenizer_.vocab_size()) {
    runner_.step_microseconds = setup.step_microseconds;
    served_ = std::make_unique<ServedRunner>(tokenizer_, runner_, std::move(setup));
  }
  ~LiveServer() {
    served_.reset();
    EXPECT_EQ(runner_.num_states, 0);
  }

  uint16_t port() const { return served_->port(); }
  ScriptedRunner& runner() { return runner_; }
  HttpServer& http() { return served_->http(); }
  engine::Engine& engine() { return served_->engine(); }
  Service& service() { return served_->service(); }
  void attach() { served_->attach(); }
  bool has_ended() const { return served_->has_ended(); }
  // Waits until the engine holds nothing; false after ten seconds.
  bool becomes_idle() const {
    return served_->becomes_idle([this] { return runner_.num_states == 0; });
  }

 private:
  int32_t id_of(std::string_view token) const { return tokenizer_.added_token(token).value(); }

  const text::Tokenizer tokenizer_;
  ScriptedRunner runner_;
  std::unique_ptr<ServedRunner> served_;
};

// A blocking socket; reads give up after ten seconds, or as long as a test wants.
class RawClient {
 public:
  // `receive_bytes` above 0: so small a buffer for what comes.
  explicit RawClient(uint16_t port, int receive_bytes = 0) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    if (receive_bytes > 0) hold(receive_bytes);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  ~RawClient() { close(); }
  RawClient(const RawClient&) = delete;
  RawClient& operator=(const RawClient&) = delete;

  // So large a buffer from now on.
  void hold(int receive_bytes) const {
    EXPECT_EQ(setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_bytes, sizeof(receive_bytes)), 0);
  }
  void send(std::string_view bytes) const { ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL); }
  void set_patience(int seconds) { patience_seconds_ = seconds; }
  // At most `size` bytes, at least one; empty at the end or where patience has.
  std::string receive(size_t size = 4096) const {
    pollfd wait{fd_, POLLIN, 0};
    if (poll(&wait, 1, 1000 * patience_seconds_) <= 0) {
      is_silent_ = true;
      return "";
    }
    std::string out(size, '\0');
    const ssize_t count = recv(fd_, out.data(), size, 0);
    out.resize(count > 0 ? static_cast<size_t>(count) : 0);
    return out;
  }
  // All that comes until the other side closes.
  std::string receive_all() const {
    std::string out;
    for (std::string part = receive(65536); !part.empty(); part = receive(65536)) out += part;
    return out;
  }
  // Its patience went by once without a byte or an end.
  bool is_silent() const { return is_silent_; }
  // Until `end` has come.
  std::string receive_until(std::string_view end) const {
    std::string out;
    while (out.find(end) == std::string::npos) {
      const std::string part = receive();
      if (part.empty()) break;
      out += part;
    }
    return out;
  }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  // Closes so that the other side gets a reset.
  void reset() {
    const linger now{1, 0};
    setsockopt(fd_, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
    close();
  }

 private:
  int fd_;
  int patience_seconds_ = 10;
  mutable bool is_silent_ = false;
};

inline std::string get(std::string_view path, std::string_view fields = "") {
  return "GET " + std::string(path) + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + std::string(fields) + "\r\n";
}
inline std::string post(std::string_view path, std::string_view body, std::string_view fields = "") {
  return "POST " + std::string(path) + " HTTP/1.1\r\nHost: x\r\nContent-Length: " + std::to_string(body.size()) +
         "\r\n" + std::string(fields) + "\r\n" + std::string(body);
}
inline std::string chat(std::string_view more = "") {
  return "{" + std::string(more) + kQuestion + "}";
}

struct Answer {
  int status = 0;
  std::string head, body;
  bool is_silent = false;  // the server stood still
};
// All that comes until the connection is closed.
inline Answer read_answer(const RawClient& client) {
  const std::string all = client.receive_all();
  Answer out;
  out.is_silent = client.is_silent();
  const size_t end = all.find("\r\n\r\n");
  if (all.size() > 12) out.status = std::atoi(all.c_str() + 9);
  out.head = all.substr(0, end);
  if (end != std::string::npos) out.body = all.substr(end + 4);
  return out;
}
// One request on a connection of its own.
inline Answer ask(uint16_t port, const std::string& request) {
  const RawClient client(port);
  client.send(request);
  return read_answer(client);
}

}  // namespace tessera::server::http
