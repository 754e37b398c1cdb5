// SPDX-License-Identifier: Apache-2.0
#include "server/http/request_head.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/ip/address_v4.hpp>
#include <boost/beast/core/string.hpp>
#include <cctype>
#include <ctime>
#include <utility>

namespace tessera::server::http {

namespace beast = boost::beast;
namespace field_of = boost::beast::http;

namespace {

// Of a client's own id, what may stand in a header of the answer.
bool is_plain_id(std::string_view id) {
  return !id.empty() && id.size() <= 128 && std::all_of(id.begin(), id.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '_' ||
           c == '.';
  });
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  const char lower = static_cast<char>(c | 0x20);
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

// What is no escape stays as it is.
std::string percent_decoded(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool is_escape =
        text[i] == '%' && i + 2 < text.size() && hex_digit(text[i + 1]) >= 0 && hex_digit(text[i + 2]) >= 0;
    if (!is_escape) {
      out += text[i];
      continue;
    }
    out += static_cast<char>(hex_digit(text[i + 1]) * 16 + hex_digit(text[i + 2]));
    i += 2;
  }
  return out;
}

// Takes "http://host" off the target's front; the host. Nothing for other forms.
std::optional<std::string> take_authority(std::string_view& target) {
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (!beast::iequals(target.substr(0, scheme.size()), scheme)) continue;
    target.remove_prefix(scheme.size());
    const size_t end = std::min(target.find_first_of("/?#"), target.size());
    const std::string host(target.substr(0, end));
    target.remove_prefix(end);
    return host;
  }
  return std::nullopt;
}

}  // namespace

RequestHead read_request_head(const field_of::request<PieceBody>& message) {
  const auto get = [&](auto name) {
    const auto value = message[name];
    return std::string(value.data(), value.size());
  };
  RequestHead head;
  head.method = std::string(message.method_string());
  head.host = get(field_of::field::host);
  std::string_view target(message.target().data(), message.target().size());
  if (auto host = take_authority(target)) {
    head.host = std::move(*host);
    if (!target.starts_with('/')) head.path = "/";
  }
  head.path += percent_decoded(target.substr(0, target.find_first_of("?#")));
  head.origin = get(field_of::field::origin);
  head.wanted_fields = get(field_of::field::access_control_request_headers);
  head.authorization = get(field_of::field::authorization);
  head.x_api_key = get("x-api-key");
  head.request_id = get("x-request-id");
  if (!is_plain_id(head.request_id)) head.request_id.clear();
  head.content_encoding = get(field_of::field::content_encoding);
  head.transfer_encoding = get(field_of::field::transfer_encoding);
  head.expects_continue = beast::iequals(get(field_of::field::expect), "100-continue");
  head.is_old = message.version() < 11;
  return head;
}

std::optional<ApiError> find_framing_fault(const field_of::request<PieceBody>& message, const RequestHead& head,
                                           bool is_chunked) {
  if (message.version() != 11 && message.version() != 10) return malformed_http("version", "HTTP/1.1", "another one");
  if (!head.is_old && message.count(field_of::field::host) != 1)
    return malformed_http("Host", "one", "none or several");
  if (message.count(field_of::field::transfer_encoding) == 0) return std::nullopt;
  if (!is_chunked) return malformed_http("Transfer-Encoding", "chunked", "something else");
  if (!beast::iequals(head.transfer_encoding, "chunked") || message.count(field_of::field::transfer_encoding) != 1) {
    return http_error(501, "unsupported_encoding", "Transfer-Encoding: expected chunked alone, found others with it");
  }
  return std::nullopt;
}

bool is_this_machine(std::string_view host) {
  if (host.starts_with("[::1]") || host == "::1") return true;
  host = host.substr(0, host.find(':'));
  boost::system::error_code error;
  const auto address = boost::asio::ip::make_address_v4(host, error);
  return error ? host == "localhost" || host.ends_with(".localhost") : address.is_loopback();
}

std::string allowed_fields(std::string_view wanted) {
  constexpr std::string_view kOurs =
      "Authorization, Content-Type, X-Api-Key, X-Request-Id, Anthropic-Version, Anthropic-Beta";
  const auto is_of_list = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == ',' || c == ' ';
  };
  const bool is_list = !wanted.empty() && std::all_of(wanted.begin(), wanted.end(), is_of_list);
  return std::string(is_list ? wanted : kOurs);
}

std::string date_field() {
  return fmt::format("Date: {:%a, %d %b %Y %H:%M:%S} GMT\r\n", fmt::gmtime(std::time(nullptr)));
}

ApiError http_error(int status, std::string_view code, std::string message) {
  ApiError error;
  error.status = status;
  if (status >= 500) error.type = "server_error";
  error.code = code;
  error.message = std::move(message);
  return error;
}

ApiError malformed_http(std::string_view where, std::string_view expected, std::string_view found) {
  return http_error(400, "malformed_http", fmt::format("{}: expected {}, found {}", where, expected, found));
}

}  // namespace tessera::server::http
