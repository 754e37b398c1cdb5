// SPDX-License-Identifier: Apache-2.0
// Size: one class whose coroutines share its state; a file for each would only spread that state.
#include "server/http/connection.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/http/parser.hpp>
#include <cmath>
#include <exception>
#include <limits>
#include <new>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/strings.h"
#include "server/http/reply_head.h"
#include "server/loading.h"

namespace tessera::server::http {

namespace beast = boost::beast;
namespace field_of = boost::beast::http;

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr size_t kInboxBytes = size_t{64} << 10;
constexpr size_t kWriteBytes = size_t{64} << 10;
// What is read and thrown away after an error, so that the client gets to see it, and for how long.
constexpr size_t kLingerBytes = size_t{1} << 20;
constexpr double kLingerSeconds = 2;

// Said where there is no memory to say anything else.
constexpr std::string_view kOutOfMemory =
    "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\nRetry-After: 1\r\n"
    "Content-Length: 100\r\n\r\n"
    R"({"error":{"message":"out of memory","type":"server_error","param":null,"code":"resource_exhausted"}})";
// Said where an exception of any other kind reached the connection. What it was stands in the log.
constexpr std::string_view kBroken =
    "HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/json\r\nConnection: close\r\n"
    "Content-Length: 97\r\n\r\n"
    R"({"error":{"message":"internal error","type":"server_error","param":null,"code":"internal_error"}})";

ApiError header_too_large(uint64_t limit) {
  return http_error(431, "header_too_large", fmt::format("header: expected at most {} bytes, found more", limit));
}

ApiError timed_out(double seconds) {
  return http_error(504, "timeout", fmt::format("answer: expected within {} s, found more to say", seconds));
}

std::string_view methods_of(const Route& route) {
  return route.is_post ? "POST" : "GET, HEAD";
}

std::string chunk(const std::string& text) {
  return fmt::format("{:x}\r\n{}\r\n", text.size(), text);
}

}  // namespace

class Connection::Parser : public field_of::request_parser<PieceBody> {};

// What the engine's thread may hold and drop: a connection that it dropped last would end on the wrong thread.
class Connection::Doorbell final : public Waker, public Bells::Bell, public std::enable_shared_from_this<Doorbell> {
 public:
  explicit Doorbell(Connection& connection)
      : bells_(connection.shared_.bells), connection_(connection.weak_from_this()) {}
  void wake() noexcept override { bells_.ring(shared_from_this()); }

 private:
  void rung() override {
    if (const std::shared_ptr<Connection> connection = connection_.lock()) connection->bell_.cancel();
  }

  Bells& bells_;
  const std::weak_ptr<Connection> connection_;
};

Connection::Connection(Shared& shared, std::unique_ptr<Transport> transport, uint64_t peer)
    : shared_(shared),
      transport_(std::move(transport)),
      peer_(peer),
      bell_(shared.io),
      space_(shared.io),
      watchdog_(shared.io) {
  shared_.figures.add_connections(1);
}

Connection::~Connection() {
  forget_body();
  shared_.figures.add_connections(-1);
}

void Connection::forget_body() {
  shared_.num_body_bytes -= std::exchange(num_body_bytes_, 0);
}

void Connection::start() {
  doorbell_ = std::make_shared<Doorbell>(*this);
  spawn(&Connection::work);
}

// A coroutine that memory ends takes the connection along: without any of the three it would stand still. Where it ends
// inside Asio, the handler is dropped and not called.
void Connection::spawn(asio::awaitable<void> (Connection::*coroutine)()) {
  struct Ending {
    explicit Ending(std::shared_ptr<Connection> its_connection) : connection(std::move(its_connection)) {}
    ~Ending() {
      if (!is_orderly) connection->close_now();
    }
    const std::shared_ptr<Connection> connection;
    bool is_orderly = false;
  };
  const auto ending = std::make_shared<Ending>(shared_from_this());
  asio::co_spawn(
      shared_.io, [self = ending->connection, coroutine] { return ((*self).*coroutine)(); },
      [ending](const std::exception_ptr& error) { ending->is_orderly = error == nullptr; });
}

void Connection::close_now() {
  is_closed_ = true;
  transport_->close();
  for (asio::steady_timer* timer : {&bell_, &space_, &watchdog_}) timer->cancel();
}

void Connection::close_when_idle() {
  closes_when_idle_ = true;
  if (!is_busy_) close_now();
}

void Connection::set_deadline(double seconds) {
  const bool is_endless = std::isinf(seconds);
  deadline_ = is_endless ? Clock::time_point::max()
                         : Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                              std::chrono::duration<double>(std::min(seconds, 1e8)));
  if (deadline_ < armed_) watchdog_.cancel();
}

asio::awaitable<void> Connection::watch() {
  const std::shared_ptr<Connection> self = shared_from_this();
  while (!is_closed_) {
    if (Clock::now() >= deadline_) {
      close_now();
      break;
    }
    armed_ = deadline_;
    watchdog_.expires_at(armed_);
    error_code error;
    co_await watchdog_.async_wait(asio::redirect_error(asio::use_awaitable, error));
  }
}

asio::awaitable<void> Connection::read_on() {
  const std::shared_ptr<Connection> self = shared_from_this();
  std::array<char, size_t{16} << 10> bytes;
  while (!is_closed_) {
    error_code error;
    if (inbox_.size() >= kInboxBytes) {
      space_.expires_at(Clock::time_point::max());
      co_await space_.async_wait(asio::redirect_error(asio::use_awaitable, error));
      continue;
    }
    const size_t count = co_await transport_->read(bytes.data(), bytes.size(), error);
    if (error) break;
    inbox_.append(bytes.data(), count);
    bell_.cancel();
  }
  is_gone_ = true;
  bell_.cancel();
}

// Waits until something has happened, or so long.
asio::awaitable<void> Connection::ring(double seconds) {
  if (std::isinf(seconds)) {
    bell_.expires_at(Clock::time_point::max());
  } else {
    bell_.expires_after(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
  }
  error_code error;
  co_await bell_.async_wait(asio::redirect_error(asio::use_awaitable, error));
}

// More bytes in the inbox, or false: none will come.
asio::awaitable<bool> Connection::more() {
  const size_t before = inbox_.size();
  while (inbox_.size() == before && !is_gone_ && !is_closed_) co_await ring(kNever);
  co_return inbox_.size() != before;
}

asio::awaitable<bool> Connection::write(std::string_view bytes) {
  while (!bytes.empty()) {
    if (is_closed_) co_return false;
    has_answered_ = true;
    const std::string_view part = bytes.substr(0, kWriteBytes);
    set_deadline(shared_.options.write_seconds);
    error_code error;
    co_await transport_->write(part, error);
    if (error) co_return false;
    bytes.remove_prefix(part.size());
  }
  set_deadline(kNever);
  co_return !is_closed_;
}

// A socket that is closed while bytes wait to be read resets the connection, and the client may lose the answer.
asio::awaitable<void> Connection::linger() {
  if (is_closed_) co_return;
  set_deadline(kLingerSeconds);
  co_await transport_->finish();
  size_t num_bytes = 0;
  while (!is_gone_ && !is_closed_ && num_bytes < kLingerBytes) {
    num_bytes += inbox_.size();
    inbox_.clear();
    space_.cancel();
    const bool has_more = co_await more();
    if (!has_more) break;
  }
}

asio::awaitable<void> Connection::work() {
  const std::shared_ptr<Connection> self = shared_from_this();
  set_deadline(shared_.options.header_seconds);
  spawn(&Connection::watch);
  error_code error;
  co_await transport_->open(error);
  if (!error && !is_closed_) {
    spawn(&Connection::read_on);
    bool goes_on = true;
    while (goes_on && !is_closed_) {
      std::string_view last_words;  // of a request that an exception ended
      has_answered_ = false;
      route_ = "other";
      try {
        goes_on = co_await serve_one();
      } catch (const std::exception& why) {
        last_words = blame(why);
        goes_on = false;
      }
      if (is_busy_ && !has_answered_ && !last_words.empty()) co_await write(last_words);
      forget_body();
      is_busy_ = false;
      if (closes_when_idle_) break;
    }
    if (!is_gone_) co_await linger();
  }
  close_now();
}

// What the client of a request is told that an exception ended, which is logged and counted.
std::string_view Connection::blame(const std::exception& error) const noexcept {
  const auto* ours = dynamic_cast<const Error*>(&error);
  const bool is_short = dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
                        (ours != nullptr && ours->code() == ErrorCode::kResourceExhausted);
  try {
    if (is_busy_ && !has_answered_) shared_.figures.add_answered(route_, is_short ? 503 : 500);
    if (shared_.log != nullptr) {
      shared_.log->write(LogLevel::kWarning, fmt::format("{}: {}", route_, printable(error.what(), 300)));
    }
  } catch (const std::exception&) {
    // There is no memory for it; the client is told all the same.
  }
  return is_short ? kOutOfMemory : kBroken;
}

// Some clients end a body with one (RFC 9112, 2.2).
void Connection::skip_empty_lines() {
  size_t num_bytes = 0;
  while (inbox_.compare(num_bytes, 2, "\r\n") == 0) num_bytes += 2;
  inbox_.erase(0, num_bytes);
  space_.cancel();
}

asio::awaitable<bool> Connection::read_head(Parser& parser) {
  set_deadline(shared_.options.idle_seconds);
  bool has_begun = false;
  while (!parser.is_header_done()) {
    if (!has_begun) {
      skip_empty_lines();
      if (inbox_.empty() || inbox_ == "\r") {
        const bool has_more = co_await more();
        if (!has_more) co_return false;
        continue;
      }
      has_begun = is_busy_ = true;
      began_ = Clock::now();
      set_deadline(shared_.options.header_seconds);
    }
    error_code error;
    const size_t count = parser.put(asio::buffer(inbox_), error);
    inbox_.erase(0, count);
    space_.cancel();
    if (error && error != field_of::error::need_more) {
      const RequestHead unknown;
      const bool is_long = error == field_of::error::header_limit || error == field_of::error::buffer_overflow;
      // The parser has no limit for a body yet, so all else is malformed.
      const ApiError refusal = is_long ? header_too_large(shared_.options.max_header_bytes)
                                       : malformed_http("header", "HTTP/1.1", error.message());
      co_await refuse(unknown, refusal, false);
      co_return false;
    }
    if (parser.is_header_done()) break;
    const bool has_more = co_await more();
    if (!has_more) co_return false;
  }
  co_return true;
}

// Bytes of the inbox to the parser, which takes one chunk at a time: all that it can use, so that those of a body in
// small chunks are moved up once.
size_t Connection::put_body(Parser& parser, error_code& error) {
  size_t num_bytes = 0;
  while (!parser.is_done() && num_bytes < inbox_.size()) {
    const size_t count = parser.put(asio::buffer(inbox_) + num_bytes, error);
    num_bytes += count;
    if (error || count == 0) break;
  }
  inbox_.erase(0, num_bytes);
  return num_bytes;
}

asio::awaitable<bool> Connection::read_body(Parser& parser, const RequestHead& head, BodyPieces& body) {
  const HttpOptions& options = shared_.options;
  const Clock::time_point began = Clock::now();
  uint64_t num_bytes = 0;
  while (!parser.is_done()) {
    if (!inbox_.empty()) {
      error_code error;
      const size_t count = put_body(parser, error);
      num_bytes += count;
      num_body_bytes_ += count;
      shared_.num_body_bytes += count;
      space_.cancel();
      if (shared_.num_body_bytes > std::max(options.max_bodies_bytes, options.max_body_bytes)) {
        const ApiError refusal = overloaded("bodies", shared_.num_body_bytes, options.max_bodies_bytes);
        co_await refuse(head, refusal, false);
        co_return false;
      }
      if (error == field_of::error::body_limit) {
        const ApiError refusal =
            body_too_large(std::max(num_bytes, options.max_body_bytes + 1), options.max_body_bytes);
        co_await refuse(head, refusal, false);
        co_return false;
      }
      if (error && error != field_of::error::need_more) {
        const ApiError refusal = malformed_http("body", "chunks or Content-Length bytes", error.message());
        co_await refuse(head, refusal, false);
        co_return false;
      }
      if (parser.is_done()) break;
      // A chunk's head or the fields behind the last do not fit: no more is read, and the parser wants more.
      if (count == 0 && inbox_.size() >= kInboxBytes) {
        const ApiError refusal = header_too_large(kInboxBytes);
        co_await refuse(head, refusal, false);
        co_return false;
      }
    }
    const double used = std::chrono::duration<double>(Clock::now() - began).count();
    set_deadline(options.header_seconds + static_cast<double>(num_bytes) / options.body_bytes_per_second - used);
    const bool has_more = co_await more();
    if (!has_more) co_return false;
  }
  set_deadline(kNever);
  body = std::move(parser.get().body());
  co_return true;
}

// Pages of other sites reach a server on this machine through their readers' browsers, which send an Origin then. A
// site whose name leads to this machine (DNS rebinding) has its own name as Host too: without keys, a server that only
// this machine reaches goes by this machine's names.
std::optional<ApiError> Connection::find_foreign(const RequestHead& head) const {
  const std::string& allowed = shared_.options.cors_origin;
  if (head.origin.empty() || allowed == "*" || head.origin == allowed) return std::nullopt;
  const size_t authority = head.origin.find("://");
  if (authority == std::string::npos || head.origin.substr(authority + 3) != head.host) {
    return http_error(403, "origin_not_allowed",
                      "Origin: expected this server's own, found another one (see --cors-origin)");
  }
  if (shared_.options.api_keys.empty() && is_this_machine(shared_.options.host) && !is_this_machine(head.host)) {
    return http_error(403, "origin_not_allowed",
                      "Host: expected a name of this machine, since there are no keys, found another one (see "
                      "--api-key-file, --cors-origin)");
  }
  return std::nullopt;
}

// What is wrong with a request before its body is looked at. Faults that leave the connection usable keep it.
std::optional<ApiError> Connection::find_fault(Parser& parser, const RequestHead& head, const Route* route,
                                               Caller& caller, bool& breaks) const {
  const HttpOptions& options = shared_.options;
  const auto length = parser.content_length();
  breaks = true;
  if (auto fault = find_framing_fault(parser.get(), head, parser.chunked())) return fault;
  if (length && *length > options.max_body_bytes) return body_too_large(*length, options.max_body_bytes);
  breaks = false;
  if (auto fault = find_foreign(head)) return fault;
  if (route == nullptr || route->needs_key) {
    std::optional<Caller> found = shared_.keys.find(head.authorization, head.x_api_key);
    if (!found) return unauthorized();
    caller = std::move(*found);
  }
  if (caller.client == 0) caller.client = peer_;
  if (route == nullptr) return not_found(head.method, head.path);
  const bool is_right = route->is_post ? head.method == "POST" : head.method == "GET" || head.method == "HEAD";
  if (!is_right) return method_not_allowed(head.method, head.path, methods_of(*route));
  if (!head.content_encoding.empty() && head.content_encoding != "identity") {
    return http_error(415, "unsupported_encoding", "Content-Encoding: expected none, found one");
  }
  return std::nullopt;
}

// Expressions that wait have no temporaries with destructors: GCC 12 destroys some of them twice.
asio::awaitable<bool> Connection::serve_one() {
  Parser parser;
  parser.header_limit(shared_.options.max_header_bytes);
  parser.body_limit(boost::none);  // the head is answered before the body is looked at
  const bool has_head = co_await read_head(parser);
  if (!has_head) co_return false;
  RequestHead head = read_request_head(parser.get());
  head.keeps_alive = parser.keep_alive() && !shared_.is_draining;
  if (head.request_id.empty()) head.request_id = RandomIds().next("req_");
  head.has_body = parser.chunked() || parser.content_length().value_or(0) > 0;
  parser.body_limit(shared_.options.max_body_bytes);
  std::string_view name;
  const Route* route = find_route(head.path, name);
  if (route != nullptr) route_ = route->path;
  Caller caller;
  bool breaks = false, goes_on = false;
  const bool is_preflight = head.method == "OPTIONS" && !shared_.options.cors_origin.empty() && !find_foreign(head);
  if (const std::optional<ApiError> fault = find_fault(parser, head, route, caller, breaks);
      fault && (breaks || !is_preflight)) {
    // Until the body has been read, an answer ends the connection: the rest of it is not another request.
    goes_on = head.keeps_alive && !head.has_body && !breaks;
    goes_on = co_await refuse(head, *fault, goes_on);
    co_return goes_on;
  }
  if (is_preflight) {
    goes_on = co_await preflight(head);
    co_return goes_on;
  }
  BodyPieces body;
  if (head.has_body) {
    if (head.expects_continue) {
      const bool is_written = co_await write("HTTP/1.1 100 Continue\r\n\r\n");
      if (!is_written) co_return false;
      has_answered_ = false;  // that was none yet
    }
    const bool is_read = co_await read_body(parser, head, body);
    if (!is_read) co_return false;
  }
  set_deadline(kNever);
  Service* const service = shared_.service;
  if (service == nullptr) {
    const ReplyPart whole = loading_reply(*route, shared_.figures.uptime_seconds());
    goes_on = co_await send_whole(head, *route, whole);
    co_return goes_on&& head.keeps_alive;
  }
  // However it ends; nothing, where it was completed.
  struct Cancelling {
    explicit Cancelling(std::shared_ptr<Exchange> its_exchange) : exchange(std::move(its_exchange)) {}
    ~Cancelling() { exchange->cancel(); }
    const std::shared_ptr<Exchange> exchange;
  };
  const Cancelling opened(service->open(*route, name, std::move(body), caller, doorbell_));
  goes_on = co_await send_parts(head, *route, *opened.exchange);
  co_return goes_on&& head.keeps_alive;
}

asio::awaitable<bool> Connection::send_whole(const RequestHead& head, const Route& route, const ReplyPart& whole) {
  std::string out =
      head_text(head, *whole.head, whole.text.size(), keeps_alive(head, *whole.head), shared_.options.cors_origin);
  if (head.method != "HEAD") out += whole.text;
  shared_.figures.add_answered(route.path, whole.head->status);
  note(head, whole.head->status);
  const bool is_written = co_await write(out);
  co_return is_written;
}

asio::awaitable<bool> Connection::send_parts(const RequestHead& head, const Route& route, Exchange& exchange) {
  // Counts as a stream as long as this lives.
  class StreamCount {
   public:
    explicit StreamCount(Figures& figures) : figures_(figures) { figures_.add_streams(1); }
    ~StreamCount() { figures_.add_streams(-1); }

   private:
    Figures& figures_;
  };
  const HttpOptions& options = shared_.options;
  std::optional<StreamCount> counted;
  bool is_stream = false, has_timed_out = false;
  for (;;) {
    if (shared_.fault) exchange.abort(*shared_.fault);
    ReplyPart part = exchange.take();
    std::string out;
    if (part.head) {
      is_stream = part.head->is_stream;
      if (!is_stream) {
        const bool is_written = co_await send_whole(head, route, part);
        co_return is_written;
      }
      counted.emplace(shared_.figures);
      out = head_text(head, *part.head, 0, keeps_alive(head, *part.head), options.cors_origin);
      shared_.figures.add_answered(route.path, part.head->status);
      note(head, part.head->status);
    }
    const bool is_chunked = !head.is_old;
    if (!part.text.empty()) out += is_chunked ? chunk(part.text) : part.text;
    if (part.is_last && is_chunked) out += "0\r\n\r\n";
    if (!out.empty()) {
      const bool is_written = co_await write(out);
      if (!is_written) co_return false;
    }
    if (part.is_last) co_return is_chunked;
    if (is_gone_ || is_closed_) co_return false;
    if (!out.empty() || part.head) continue;
    // Nothing new: wait for it.
    const Clock::time_point before = Clock::now();
    const double age = std::chrono::duration<double>(before - began_).count();
    double wait = options.keep_alive_seconds;
    if (options.request_seconds > 0) wait = std::min(wait, std::max(0.0, options.request_seconds - age));
    co_await ring(wait);
    if (is_gone_ || is_closed_) co_return false;
    const double now_age = std::chrono::duration<double>(Clock::now() - began_).count();
    if (options.request_seconds > 0 && now_age >= options.request_seconds && !has_timed_out) {
      has_timed_out = true;
      exchange.abort(timed_out(options.request_seconds));
      continue;
    }
    const double waited = std::chrono::duration<double>(Clock::now() - before).count();
    if (is_stream && waited >= options.keep_alive_seconds) {
      out = is_chunked ? chunk(exchange.keep_alive()) : exchange.keep_alive();
      const bool is_written = co_await write(out);
      if (!is_written) co_return false;
    }
  }
}

bool Connection::keeps_alive(const RequestHead& head, const ReplyHead& reply) const {
  return head.keeps_alive && !shared_.is_draining && !(reply.is_stream && head.is_old);
}

asio::awaitable<bool> Connection::refuse(const RequestHead& head, const ApiError& error, bool keeps_alive) {
  RequestHead now = head;
  now.keeps_alive = keeps_alive;
  if (now.request_id.empty()) now.request_id = RandomIds().next("req_");
  std::string_view name;
  const Route* route = find_route(head.path, name);
  shared_.figures.add_answered(route != nullptr ? route->path : "other", error.status);
  note(now, error.status);
  const std::string body = error_body(error_style(head.path), error);
  std::string extra;
  // Browsers ask their reader for a password, which is the key.
  if (error.status == 401) {
    extra = route != nullptr && route->kind == RouteKind::kPage
                ? "WWW-Authenticate: Basic realm=\"tessera: any name, an API key as password\"\r\n"
                : "WWW-Authenticate: Bearer\r\n";
  }
  if (error.status == 429) extra = retry_fields(1);
  if (error.status == 405 && route != nullptr) extra = fmt::format("Allow: {}\r\n", methods_of(*route));
  const std::string out =
      fmt::format("HTTP/1.1 {} {}\r\nContent-Type: application/json\r\n{}{}Content-Length: {}\r\n\r\n{}", error.status,
                  status_text(error.status), common_fields(now, keeps_alive, shared_.options.cors_origin), extra,
                  body.size(), head.method == "HEAD" ? "" : body);
  const bool is_written = co_await write(out);
  co_return is_written&& keeps_alive;
}

// Client libraries send fields of their own (x-stainless-os, ...): the one site that is allowed may send what it asks
// for.
asio::awaitable<bool> Connection::preflight(const RequestHead& head) {
  const std::string out = fmt::format(
      "HTTP/1.1 204 No Content\r\n{}Access-Control-Allow-Methods: GET, POST\r\nAccess-Control-Allow-Headers: {}\r\n"
      "Access-Control-Max-Age: 600\r\n\r\n",
      common_fields(head, head.keeps_alive && !head.has_body, shared_.options.cors_origin),
      allowed_fields(head.wanted_fields));
  const bool is_written = co_await write(out);
  co_return is_written&& head.keeps_alive && !head.has_body;
}

void Connection::note(const RequestHead& head, int status) const {
  if (shared_.log == nullptr) return;
  const double seconds = std::chrono::duration<double>(Clock::now() - began_).count();
  shared_.log->write(LogLevel::kDebug, fmt::format("{} {} {} {:.3f}s {}", printable(head.method, 16),
                                                   printable(head.path, 80), status, seconds, head.request_id));
}

}  // namespace tessera::server::http
