// SPDX-License-Identifier: Apache-2.0
#include "server/http/http_server.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <exception>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/strings.h"
#include "server/http/connection.h"

namespace tessera::server::http {

namespace {

using asio::ip::tcp;

// What connections get to finish writing once the engine has nothing to do.
constexpr auto kFlushTime = std::chrono::seconds(5);
constexpr auto kShortFlushTime =
    std::chrono::milliseconds(500);                      // of an end at once: no more than an error is on its way
constexpr auto kBreakOffTime = std::chrono::seconds(1);  // of which that is a part
constexpr auto kAcceptPause = std::chrono::milliseconds(100);
// How long something that failed waits to be tried again, and how often the end of a drain is looked for.
constexpr auto kMoment = std::chrono::milliseconds(10);

void load_pem(asio::ssl::context& context, const HttpOptions& options) {
  namespace ssl = asio::ssl;
  context.set_options(ssl::context::default_workarounds | ssl::context::no_tlsv1 | ssl::context::no_tlsv1_1 |
                      ssl::context::no_sslv3 | ssl::context::no_compression);
  error_code error;
  context.use_certificate_chain_file(options.tls_cert, error);
  if (error) {
    fail(ErrorCode::kInvalidArgument, fmt::format("{}: expected a certificate chain in PEM, found {}",
                                                  printable(options.tls_cert), error.message()));
  }
  context.use_private_key_file(options.tls_key, ssl::context::pem, error);
  if (error) {
    fail(ErrorCode::kInvalidArgument, fmt::format("{}: expected the certificate's private key in PEM, found {}",
                                                  printable(options.tls_key), error.message()));
  }
}

void listen_at(tcp::acceptor& acceptor, const HttpOptions& options) {
  error_code error;
  tcp::resolver resolver(acceptor.get_executor());
  const auto found = resolver.resolve(options.host, std::to_string(options.port),
                                      tcp::resolver::passive | tcp::resolver::numeric_service, error);
  if (error || found.empty()) {
    fail(ErrorCode::kInvalidArgument, fmt::format("--host: expected an address of this machine, found \"{}\": {}",
                                                  printable(options.host, 100), error.message()));
  }
  const tcp::endpoint endpoint = *found.begin();
  acceptor.open(endpoint.protocol(), error);
  if (!error) acceptor.set_option(tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor.bind(endpoint, error);
  if (!error) acceptor.listen(asio::socket_base::max_listen_connections, error);
  if (error) {
    fail(ErrorCode::kInvalidArgument, fmt::format("--host {} --port {}: cannot listen: {}",
                                                  printable(options.host, 100), options.port, error.message()));
  }
}

// Without the port: all of a client's connections count as one.
uint64_t peer_of(const tcp::socket& socket) {
  error_code error;
  const tcp::endpoint endpoint = socket.remote_endpoint(error);
  return error ? 1 : std::max<uint64_t>(1, std::hash<std::string>()(endpoint.address().to_string()));
}

// The last set that names a signal gives it its default action back when it goes. One more set, that never goes, keeps
// a signal that comes when all is over from making a failure of an end that went well.
void keep_signals_from_killing() {
  static asio::io_context* const context = new asio::io_context(1);
  [[maybe_unused]] static const asio::signal_set* const kept = new asio::signal_set(*context, SIGTERM, SIGINT);
}

}  // namespace

class HttpServer::Body {
 public:
  Body(HttpOptions options, Figures& figures, ServerEvents* events, LogSink* log);
  uint16_t port() const { return port_; }
  void run();
  void attach(Service& service) noexcept { shared_.service = &service; }
  bool has_been_told_to_end() const noexcept { return num_stops_ > 0; }
  void drain() noexcept {
    ++num_stops_;
    io_.stop();  // run() looks
  }
  void break_off(std::string_view state);

 private:
  asio::awaitable<void> accept();
  bool attend() noexcept;
  void begin_accepting();
  void watch_signals();
  void begin_drains();
  void tell_of_drain(double seconds) const noexcept;
  void end_answers() noexcept;
  void turn(bool is_endless) noexcept;
  bool has_connections() const;
  void tell(std::string_view what, const std::exception& error) const noexcept;
  template <class Act>
  void each_connection(const Act& act);

  const HttpOptions options_;
  ServerEvents* const events_;
  LogSink* const log_;
  const ApiKeys keys_;
  // The first three are no handler's business once run() has seen the end.
  bool is_open_ = false, is_accepting_ = false, is_watching_ = false;  // before the context, which drops handlers
  std::atomic<int> num_stops_{0};                                      // that were asked for
  std::atomic<bool> is_drained_{false};
  std::mutex lock_;                     // of the next three
  std::condition_variable has_closed_;  // its connections
  bool is_closed_ = false;
  std::string broken_state_;
  std::atomic<bool> is_broken_off_{false};  // after broken_state_ is there
  asio::io_context io_{1};
  asio::ssl::context tls_{asio::ssl::context::tls_server};
  tcp::acceptor acceptor_{io_};
  uint16_t port_ = 0;
  asio::signal_set signals_{io_};
  Bells bells_{io_};
  Connection::Shared shared_;
  std::vector<std::weak_ptr<Connection>> connections_;
  std::vector<std::jthread> drainers_;
};

HttpServer::Body::Body(HttpOptions options, Figures& figures, ServerEvents* events, LogSink* log)
    : options_(std::move(options)), events_(events), log_(log), keys_(options_.api_keys), shared_{io_,   options_,
                                                                                                  keys_, figures,
                                                                                                  log,   bells_} {
  if (!options_.tls_cert.empty()) load_pem(tls_, options_);
  listen_at(acceptor_, options_);
  port_ = acceptor_.local_endpoint().port();
  if (!options_.handles_signals) return;
  keep_signals_from_killing();
  // From here on a signal waits for run().
  signals_.add(SIGTERM);
  signals_.add(SIGINT);
}

template <class Act>
void HttpServer::Body::each_connection(const Act& act) {
  for (const std::weak_ptr<Connection>& weak : connections_) {
    if (const std::shared_ptr<Connection> connection = weak.lock()) act(*connection);
  }
}

asio::awaitable<void> HttpServer::Body::accept() {
  size_t num_since_sweep = 0;
  while (acceptor_.is_open()) {
    error_code error;
    tcp::socket socket = co_await acceptor_.async_accept(asio::redirect_error(asio::use_awaitable, error));
    if (error == asio::error::operation_aborted || !acceptor_.is_open()) break;
    if (error) {
      // Out of descriptors, say: those who wait keep waiting.
      asio::steady_timer pause(io_, kAcceptPause);
      co_await pause.async_wait(asio::redirect_error(asio::use_awaitable, error));
      continue;
    }
    if (++num_since_sweep > connections_.size() / 2) {
      std::erase_if(connections_, [](const auto& weak) { return weak.expired(); });
      num_since_sweep = 0;
    }
    if (connections_.size() >= options_.max_connections) {
      std::erase_if(connections_, [](const auto& weak) { return weak.expired(); });
      if (connections_.size() >= options_.max_connections) continue;  // closes it
    }
    socket.set_option(tcp::no_delay(true), error);
    const uint64_t peer = peer_of(socket);
    std::unique_ptr<Transport> transport =
        options_.tls_cert.empty() ? plain_transport(std::move(socket)) : tls_transport(std::move(socket), tls_);
    const auto connection = std::make_shared<Connection>(shared_, std::move(transport), peer);
    connections_.push_back(connection);
    connection->start();
  }
}

void HttpServer::Body::tell(std::string_view what, const std::exception& error) const noexcept try {
  if (log_ != nullptr) log_->write(LogLevel::kWarning, fmt::format("{}: {}", what, printable(error.what(), 300)));
} catch (const std::exception&) {
  // Without memory for a line there is none.
}

// Asio drops a handler that it has no memory to call.
void HttpServer::Body::begin_accepting() {
  struct Ending {
    explicit Ending(Body& its_body) : body(its_body) { body.is_accepting_ = true; }
    ~Ending() {
      body.is_accepting_ = false;
      if (has_begun && body.is_open_) body.io_.stop();
    }
    Body& body;
    bool has_begun = false;
  };
  auto ending = std::make_shared<Ending>(*this);
  asio::co_spawn(io_, accept(), [this, ending](const std::exception_ptr& error) {
    try {
      if (error != nullptr) std::rethrow_exception(error);
    } catch (const std::exception& why) {
      tell("accepting connections", why);
    }
  });
  ending->has_begun = true;
}

void HttpServer::Body::watch_signals() {
  signals_.async_wait([this](const error_code& error, int) {
    is_watching_ = false;
    if (!error) ++num_stops_;
    if (is_open_) io_.stop();
  });
  is_watching_ = true;
}

void HttpServer::Body::tell_of_drain(double seconds) const noexcept {
  if (events_ == nullptr) return;
  try {
    events_->draining(seconds);
  } catch (const std::exception& error) {
    tell("saying that the server drains", error);
  }
}

// The first one waits for what runs, a second one ends it.
void HttpServer::Body::begin_drains() {
  shared_.is_draining = true;
  Service* const service = shared_.service;
  if (service == nullptr) {
    is_drained_ = true;
    return tell_of_drain(0);
  }
  service->set_draining();
  while (drainers_.size() < 2 && drainers_.size() < static_cast<size_t>(num_stops_)) {
    const bool is_first = drainers_.empty();
    const double seconds = is_first ? options_.drain_seconds : 0;
    drainers_.emplace_back([this, service, seconds, is_first] {
      service->engine().drain(seconds);
      if (is_first) is_drained_ = true;
    });
    if (is_first) tell_of_drain(seconds);
  }
}

void HttpServer::Body::break_off(std::string_view state) {
  std::unique_lock<std::mutex> hold(lock_);
  broken_state_ = state;
  is_broken_off_ = true;
  io_.stop();  // run() looks
  has_closed_.wait_for(hold, kBreakOffTime, [this] { return is_closed_; });
}

// By exchanges themselves: the engine is not asked.
void HttpServer::Body::end_answers() noexcept {
  shared_.is_draining = true;
  try {
    const std::lock_guard<std::mutex> hold(lock_);
    shared_.fault = unavailable(broken_state_);
  } catch (const std::exception& error) {
    tell("ending answers", error);
  }
  each_connection([](Connection& connection) { connection.look_up(); });
}

// Whatever should be under way and is not. False: there was no memory, or no thread, for some of it; to be tried again.
bool HttpServer::Body::attend() noexcept try {
  if (num_stops_ > 0) begin_drains();
  if (options_.handles_signals && !is_watching_) watch_signals();
  if (!is_accepting_) begin_accepting();
  return true;
} catch (const std::exception& error) {
  tell("serving", error);
  return false;
}

// Handlers, until somebody stops them or for a moment. What memory ends comes out of them and ends nothing but itself.
void HttpServer::Body::turn(bool is_endless) noexcept {
  try {
    if (is_endless) {
      io_.run();
    } else {
      io_.run_for(kMoment);
    }
  } catch (const std::exception& error) {
    tell("a connection", error);
    std::this_thread::sleep_for(kMoment);  // what comes at once again must not take the processor
  }
  // Before anything is looked at: a stop from here on ends the next turn.
  if (io_.stopped()) io_.restart();
}

bool HttpServer::Body::has_connections() const {
  return std::any_of(connections_.begin(), connections_.end(), [](const auto& weak) { return !weak.expired(); });
}

void HttpServer::Body::run() {
  {
    const auto goes_on = asio::make_work_guard(io_);
    is_open_ = true;
    while (!is_drained_ && !is_broken_off_) {
      const bool is_well = attend();
      turn(is_well && num_stops_ == 0);
    }
    is_open_ = false;
  }
  error_code ignored;
  acceptor_.close(ignored);
  if (is_broken_off_) end_answers();
  each_connection([](Connection& connection) { connection.close_when_idle(); });
  // A client that does not take its answer's end, or does not send its request's, holds up nothing for long.
  const auto begin = std::chrono::steady_clock::now();
  const auto goes_on = [&] {
    const bool is_short = num_stops_ > 1 || is_broken_off_ || shared_.service == nullptr;
    return std::chrono::steady_clock::now() - begin < (is_short ? kShortFlushTime : kFlushTime);
  };
  while (has_connections() && goes_on()) turn(false);
  each_connection([](Connection& connection) { connection.close_now(); });
  {
    const std::lock_guard<std::mutex> hold(lock_);
    is_closed_ = true;
  }
  has_closed_.notify_all();
  while (has_connections()) turn(false);
  signals_.cancel(ignored);
  drainers_.clear();  // their engine is the service's: neither has to outlive this
}

HttpServer::HttpServer(HttpOptions options, Figures& figures, ServerEvents* events, LogSink* log)
    : body_(std::make_unique<Body>(std::move(options), figures, events, log)) {}
HttpServer::~HttpServer() = default;
void HttpServer::check(const HttpOptions& options) {
  if (!options.tls_cert.empty()) {
    asio::ssl::context tls{asio::ssl::context::tls_server};
    load_pem(tls, options);
  }
  asio::io_context io;
  tcp::acceptor acceptor(io);
  listen_at(acceptor, options);
}
uint16_t HttpServer::port() const {
  return body_->port();
}
void HttpServer::run() {
  body_->run();
}
void HttpServer::attach(Service& service) noexcept {
  body_->attach(service);
}
bool HttpServer::has_been_told_to_end() const noexcept {
  return body_->has_been_told_to_end();
}
void HttpServer::drain() noexcept {
  body_->drain();
}
void HttpServer::break_off(std::string_view state) noexcept {
  try {
    body_->break_off(state);
  } catch (const std::exception&) {
    // Without memory for the words clients see their connections close.
  }
}

}  // namespace tessera::server::http
