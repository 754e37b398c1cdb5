// SPDX-License-Identifier: Apache-2.0
#pragma once
// One client's connection: request after request, each read within limits, authorised, answered. All on the server's
// thread, its end too: other threads only hold its doorbell.
//   reader coroutine: bytes -> inbox_ (bounded), and notices that the client has gone
//   main coroutine:   inbox_ -> parser -> service -> answer
//   watchdog:         closes the socket at deadline_, which ends both
#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "server/http/api_keys.h"
#include "server/http/bells.h"
#include "server/http/http_server.h"
#include "server/http/request_head.h"
#include "server/http/transport.h"

namespace tessera::server::http {

class Connection final : public std::enable_shared_from_this<Connection> {
 public:
  // What all connections share; outlives them.
  struct Shared {
    asio::io_context& io;
    const HttpOptions& options;
    const ApiKeys& keys;
    Figures& figures;
    LogSink* log;
    Bells& bells;
    std::atomic<Service*> service{nullptr};  // null: the model loads
    bool is_draining = false;
    std::optional<ApiError> fault;  // that ends all answers, whatever the engine does
    uint64_t num_body_bytes = 0;    // of the requests under way
  };

  // `peer` tells clients without keys apart.
  Connection(Shared& shared, std::unique_ptr<Transport> transport, uint64_t peer);
  ~Connection();

  // Begins; the connection owns itself until it ends.
  void start();
  // Ends as soon as no answer is under way.
  void close_when_idle();
  void close_now();
  // The answer under way looks at what is shared.
  void look_up() { bell_.cancel(); }

 private:
  using Clock = std::chrono::steady_clock;
  class Parser;
  class Doorbell;

  void spawn(asio::awaitable<void> (Connection::*coroutine)());
  asio::awaitable<void> work();
  asio::awaitable<void> read_on();
  asio::awaitable<void> watch();
  asio::awaitable<bool> serve_one();
  void skip_empty_lines();
  asio::awaitable<bool> read_head(Parser& parser);
  size_t put_body(Parser& parser, error_code& error);
  asio::awaitable<bool> read_body(Parser& parser, const RequestHead& head, BodyPieces& body);
  asio::awaitable<bool> send_whole(const RequestHead& head, const Route& route, const ReplyPart& whole);
  asio::awaitable<bool> send_parts(const RequestHead& head, const Route& route, Exchange& exchange);
  bool keeps_alive(const RequestHead& head, const ReplyHead& reply) const;
  asio::awaitable<bool> refuse(const RequestHead& head, const ApiError& error, bool keeps_alive);
  asio::awaitable<bool> preflight(const RequestHead& head);
  asio::awaitable<bool> more();
  asio::awaitable<void> ring(double seconds);
  asio::awaitable<bool> write(std::string_view bytes);
  asio::awaitable<void> linger();
  std::optional<ApiError> find_fault(Parser& parser, const RequestHead& head, const Route* route, Caller& caller,
                                     bool& breaks) const;
  std::optional<ApiError> find_foreign(const RequestHead& head) const;
  void set_deadline(double seconds);  // from now; infinite: none
  void forget_body();
  void note(const RequestHead& head, int status) const;
  std::string_view blame(const std::exception& error) const noexcept;

  Shared& shared_;
  const std::unique_ptr<Transport> transport_;
  const uint64_t peer_;
  asio::steady_timer bell_, space_, watchdog_;
  std::shared_ptr<Doorbell> doorbell_;
  Clock::time_point deadline_ = Clock::time_point::max(), armed_ = Clock::time_point::max();
  std::string inbox_;
  uint64_t num_body_bytes_ = 0;  // of the request under way; counted in shared_ too
  Clock::time_point began_;      // the request under way
  bool is_gone_ = false, is_closed_ = false, is_busy_ = false, closes_when_idle_ = false;
  bool has_answered_ = false;         // the request under way, in part at least
  std::string_view route_ = "other";  // its path, as the program knows it
};

}  // namespace tessera::server::http
