// SPDX-License-Identifier: Apache-2.0
#include "server/http/http_server.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <csignal>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/strings.h"
#include "server/http/connection.h"

namespace tessera::server::http {

namespace {

using asio::ip::tcp;

// What connections get to finish writing once the engine has nothing to do.
constexpr double kFlushSeconds = 5;
constexpr auto kAcceptPause = std::chrono::milliseconds(100);

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

// Without the port: all of a client's connections count as one.
uint64_t peer_of(const tcp::socket& socket) {
  error_code error;
  const tcp::endpoint endpoint = socket.remote_endpoint(error);
  return error ? 1 : std::max<uint64_t>(1, std::hash<std::string>()(endpoint.address().to_string()));
}

}  // namespace

class HttpServer::Body {
 public:
  Body(HttpOptions options, Service& service, ServerEvents* events, LogSink* log);
  ~Body();
  uint16_t port() const { return port_; }
  void run();
  void drain() {
    asio::post(io_, [this] { begin_drain(); });
  }

 private:
  void listen();
  asio::awaitable<void> accept();
  bool begin_accepting() noexcept;
  asio::awaitable<void> watch_signals();
  asio::awaitable<void> close_later();
  void begin_drain();
  void drained();
  template <class Act>
  void each_connection(const Act& act);

  const HttpOptions options_;
  Service& service_;
  ServerEvents* const events_;
  const ApiKeys keys_;
  bool is_accepting_ = false;  // before the context, which drops handlers when it goes
  asio::io_context io_{1};
  asio::ssl::context tls_{asio::ssl::context::tls_server};
  tcp::acceptor acceptor_{io_};
  uint16_t port_ = 0;
  asio::signal_set signals_{io_};
  asio::steady_timer flush_{io_};
  Connection::Shared shared_;
  std::vector<std::weak_ptr<Connection>> connections_;
  std::vector<std::thread> drainers_;
};

HttpServer::Body::Body(HttpOptions options, Service& service, ServerEvents* events, LogSink* log)
    : options_(std::move(options)), service_(service), events_(events), keys_(options_.api_keys), shared_{io_,
                                                                                                          options_,
                                                                                                          keys_,
                                                                                                          service,
                                                                                                          log,
                                                                                                          false} {
  if (!options_.tls_cert.empty()) load_pem(tls_, options_);
  listen();
  if (!options_.handles_signals) return;
  // From here on a signal waits for run().
  signals_.add(SIGTERM);
  signals_.add(SIGINT);
}

HttpServer::Body::~Body() {
  for (std::thread& thread : drainers_) thread.join();
}

void HttpServer::Body::listen() {
  error_code error;
  tcp::resolver resolver(io_);
  const auto found = resolver.resolve(options_.host, std::to_string(options_.port),
                                      tcp::resolver::passive | tcp::resolver::numeric_service, error);
  if (error || found.empty()) {
    fail(ErrorCode::kInvalidArgument, fmt::format("--host: expected an address of this machine, found \"{}\": {}",
                                                  printable(options_.host, 100), error.message()));
  }
  const tcp::endpoint endpoint = *found.begin();
  acceptor_.open(endpoint.protocol(), error);
  if (!error) acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor_.bind(endpoint, error);
  if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
  if (error) {
    fail(ErrorCode::kInvalidArgument, fmt::format("--host {} --port {}: cannot listen: {}",
                                                  printable(options_.host, 100), options_.port, error.message()));
  }
  port_ = acceptor_.local_endpoint().port();
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

asio::awaitable<void> HttpServer::Body::watch_signals() {
  for (;;) {
    error_code error;
    co_await signals_.async_wait(asio::redirect_error(asio::use_awaitable, error));
    if (error) break;
    begin_drain();
  }
}

void HttpServer::Body::begin_drain() {
  const bool is_first = !shared_.is_draining;
  const double seconds = is_first ? options_.drain_seconds : 0;
  shared_.is_draining = true;
  service_.set_draining();
  if (is_first && events_ != nullptr) events_->draining(seconds);
  if (drainers_.size() > 1) return;
  drainers_.emplace_back([this, seconds, is_first] {
    service_.engine().drain(seconds);
    asio::post(io_, [this, is_first] {
      if (is_first) drained();
    });
  });
}

void HttpServer::Body::drained() {
  error_code ignored;
  acceptor_.close(ignored);
  signals_.cancel(ignored);
  each_connection([](Connection& connection) { connection.close_when_idle(); });
  asio::co_spawn(io_, close_later(), asio::detached);
}

// A client that does not take its answer's end holds up nothing for long.
asio::awaitable<void> HttpServer::Body::close_later() {
  const auto has_open = [this] {
    return std::any_of(connections_.begin(), connections_.end(), [](const auto& weak) { return !weak.expired(); });
  };
  for (double waited = 0; waited < kFlushSeconds && has_open(); waited += 0.01) {
    flush_.expires_after(std::chrono::milliseconds(10));
    error_code error;
    co_await flush_.async_wait(asio::redirect_error(asio::use_awaitable, error));
  }
  each_connection([](Connection& connection) { connection.close_now(); });
}

void HttpServer::Body::run() {
  if (options_.handles_signals) asio::co_spawn(io_, watch_signals(), asio::detached);
  // What memory ends comes out of io_.run() and ends nothing but itself.
  while (acceptor_.is_open()) {
    const bool is_accepting = begin_accepting();
    try {
      if (is_accepting) {
        io_.run();
      } else {
        io_.run_for(kAcceptPause);
      }
    } catch (const std::exception&) {
      continue;
    }
    if (io_.stopped()) io_.restart();
  }
  while (!io_.stopped()) {
    try {
      io_.run();
    } catch (const std::exception&) {
      each_connection([](Connection& connection) { connection.close_now(); });
    }
  }
}

// False: there was no memory to wait for clients; to be tried again.
bool HttpServer::Body::begin_accepting() noexcept {
  if (is_accepting_) return true;
  // Asio drops a handler that it has no memory to call.
  struct Ending {
    explicit Ending(bool& its_flag) : is_accepting(its_flag) { is_accepting = true; }
    ~Ending() { is_accepting = false; }
    bool& is_accepting;
  };
  try {
    auto ending = std::make_shared<Ending>(is_accepting_);
    asio::co_spawn(io_, accept(), [ending](const std::exception_ptr& error) {
      ending->is_accepting = false;
      if (error != nullptr) std::rethrow_exception(error);
    });
  } catch (const std::exception&) {
    is_accepting_ = false;
  }
  return is_accepting_;
}

HttpServer::HttpServer(HttpOptions options, Service& service, ServerEvents* events, LogSink* log)
    : body_(std::make_unique<Body>(std::move(options), service, events, log)) {}
HttpServer::~HttpServer() = default;
uint16_t HttpServer::port() const {
  return body_->port();
}
void HttpServer::run() {
  body_->run();
}
void HttpServer::drain() {
  body_->drain();
}

}  // namespace tessera::server::http
