// SPDX-License-Identifier: Apache-2.0
#include "server/http/reply_head.h"

#include <fmt/format.h>

#include <boost/beast/http/status.hpp>

#include "server/routes.h"

namespace tessera::server::http {

namespace field_of = boost::beast::http;

std::string_view status_text(int status) {
  return {field_of::obsolete_reason(field_of::int_to_status(static_cast<unsigned>(status))).data(),
          field_of::obsolete_reason(field_of::int_to_status(static_cast<unsigned>(status))).size()};
}

// The second is what OpenAI's clients look for first.
std::string retry_fields(int64_t seconds) {
  return fmt::format("Retry-After: {}\r\nretry-after-ms: {}\r\n", seconds, seconds * 1000);
}

std::string common_fields(const RequestHead& head, bool keeps_alive, const std::string& cors_origin) {
  std::string out = date_field();
  out += fmt::format("X-Request-Id: {}\r\nX-Content-Type-Options: nosniff\r\nConnection: {}\r\n", head.request_id,
                     keeps_alive ? "keep-alive" : "close");
  // Where Anthropic's clients look for it.
  if (error_style(head.path) == ErrorStyle::kAnthropic) out += fmt::format("request-id: {}\r\n", head.request_id);
  if (!cors_origin.empty()) {
    out += fmt::format(
        "Access-Control-Allow-Origin: {}\r\nVary: Origin\r\n"
        "Access-Control-Expose-Headers: X-Request-Id, request-id, Retry-After, retry-after-ms\r\n",
        cors_origin);
  }
  return out;
}

std::string head_text(const RequestHead& head, const ReplyHead& reply, size_t length, bool keeps_alive,
                      const std::string& cors_origin) {
  std::string out = fmt::format("HTTP/1.1 {} {}\r\nContent-Type: {}\r\n", reply.status, status_text(reply.status),
                                reply.content_type);
  out += common_fields(head, keeps_alive, cors_origin);
  if (reply.retry_after_seconds > 0) {
    out += retry_fields(reply.retry_after_seconds);
  }
  if (reply.content_type.starts_with("text/html")) {
    out +=
        "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n";
  }
  if (reply.is_stream) {
    out += "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n";
    if (!head.is_old) out += "Transfer-Encoding: chunked\r\n";
  } else {
    out += fmt::format("Content-Length: {}\r\n", length);
  }
  out += "\r\n";
  return out;
}

}  // namespace tessera::server::http
