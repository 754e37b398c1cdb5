// SPDX-License-Identifier: Apache-2.0
#pragma once
// The service behind a socket: HTTP/1.1 with keep-alive, TLS, API keys. One thread does all input and output. It
// listens before there is a service, and says that the model loads then. docs/serving.md says what clients may expect,
// docs/decisions/0020-http-server.md why it is built so.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/log.h"
#include "server/service.h"

namespace tessera::server::http {

struct HttpOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 8000;               // 0: any that is free
  std::string tls_cert, tls_key;      // PEM files; empty: no TLS
  std::vector<std::string> api_keys;  // empty: everybody may ask
  std::string cors_origin;            // the one foreign origin whose pages may ask; "*": all; empty: none
  uint32_t max_header_bytes = 16 << 10;
  uint64_t max_body_bytes = uint64_t{64} << 20;
  uint64_t max_bodies_bytes = uint64_t{512} << 20;  // of all requests under way; above max_body_bytes
  size_t max_connections = 4096;
  double header_seconds = 10;               // for TLS' beginning, and from a header's first byte to its last
  double idle_seconds = 75;                 // between requests
  double body_bytes_per_second = 16 << 10;  // a slower body ends the connection, after header_seconds at least
  double write_seconds = 60;                // without progress
  double keep_alive_seconds = 10;           // a stream that is silent so long says that it lives
  double request_seconds = 0;               // for a whole answer; 0: no limit
  double drain_seconds = 30;                // for what runs when the end is asked for
  bool handles_signals = false;             // SIGTERM, SIGINT: drain; once more: end at once
};

// Told by the server's thread.
class ServerEvents {
 public:
  virtual ~ServerEvents() = default;
  // No more requests are taken; what runs may take so long. 0 where nothing can run, since the model loads.
  virtual void draining(double seconds) = 0;
};

class HttpServer {
 public:
  // Binds and listens; connections wait until run(). Figures, events and log (both may be null) must outlive it. Throws
  // kInvalidArgument or kNotFound, naming host, port or file, for what cannot be used.
  HttpServer(HttpOptions options, Figures& figures, ServerEvents* events, LogSink* log);
  // Throws what the constructor would, now, for who has other things to do before it listens.
  static void check(const HttpOptions& options);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  uint16_t port() const;
  // Serves until a drain has ended and all connections are closed.
  void run();
  // From now on `service` answers, also on the connections that there are; it must outlive run(). Once, from any
  // thread.
  void attach(Service& service) noexcept;
  // By a signal or drain(), from any thread.
  bool has_been_told_to_end() const noexcept;
  // Ends run(): new requests get 503, those that run may finish for drain_seconds. Again: ends them at once.
  // Thread-safe.
  void drain() noexcept;
  // Ends run() at once, though the engine may never end a step again: answers under way end with 503, "server: expected
  // ready, found STATE", streams with that as their error. Returns when clients have it, or after a second at most.
  // Any thread but run()'s, while the server lives.
  void break_off(std::string_view state) noexcept;

 private:
  class Body;
  const std::unique_ptr<Body> body_;
};

}  // namespace tessera::server::http
