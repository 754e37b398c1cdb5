// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a request's head says, as far as it matters (RFC 9110, RFC 9112).
#include <boost/beast/http/message.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "server/api_error.h"
#include "server/http/piece_body.h"

namespace tessera::server::http {

struct RequestHead {
  std::string method;
  std::string path;  // without query, %XX decoded
  std::string host;  // with a port, perhaps
  std::string origin, authorization, x_api_key, content_encoding, transfer_encoding;
  std::string wanted_fields;  // Access-Control-Request-Headers
  std::string request_id;     // the client's, or empty: it may stand in a header of the answer
  bool has_body = false, expects_continue = false, keeps_alive = false, is_old = false;  // HTTP/1.0
};

// Of what the message itself says; has_body and keeps_alive are left to who parsed it. A target in absolute form
// ("http://host/path", which proxies get) names the host instead of the Host field (RFC 9112, 3.2.2).
RequestHead read_request_head(const boost::beast::http::request<PieceBody>& message);

// Whether a host, with a port perhaps, is this machine by its own names: localhost, 127.0.0.0/8, [::1].
bool is_this_machine(std::string_view host);

// What a preflight's answer lets a page send: the fields it asks for, or, where it asks for none or for what are no
// names of fields, those that the API has.
std::string allowed_fields(std::string_view wanted);

// What is wrong with how the message is framed: nobody knows where the next one begins. `is_chunked`: what the parser
// made of it.
std::optional<ApiError> find_framing_fault(const boost::beast::http::request<PieceBody>& message,
                                           const RequestHead& head, bool is_chunked);

// "Date: Mon, 23 Nov 2026 15:04:05 GMT" with the line's end (RFC 9110, 6.6.1).
std::string date_field();

// An error of HTTP itself, not of a route.
ApiError http_error(int status, std::string_view code, std::string message);
ApiError malformed_http(std::string_view where, std::string_view expected, std::string_view found);

}  // namespace tessera::server::http
