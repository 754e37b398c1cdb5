// SPDX-License-Identifier: Apache-2.0
#include "server/api_error.h"

#include <fmt/format.h>

#include "base/json.h"
#include "base/strings.h"
#include "server/json_text.h"

namespace tessera::server {

namespace {

// A body stays below a KiB whatever the client wrote.
constexpr size_t kMaxMessageBytes = 320, kMaxParamBytes = 96;

ApiError made(int status, std::string_view type, std::string_view code, std::string message) {
  return {status, std::string(type), std::string(code), std::move(message), ""};
}

std::string_view anthropic_type(int status) {
  switch (status) {
    case 400:
    case 405:
      return "invalid_request_error";
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 413:
      return "request_too_large";
    case 429:
      return "rate_limit_error";
    case 503:
      return "overloaded_error";
    default:
      return "api_error";
  }
}

}  // namespace

void fail_field(std::string_view code, const std::string& field, std::string_view expected, std::string_view found) {
  const std::string where = field.empty() ? "body" : printable(field, kMaxParamBytes);
  ApiError error;
  error.code = code;
  error.message =
      printable(fmt::format("{}: expected {}, found {}", where, printable(expected, 120), found), kMaxMessageBytes);
  error.param = field.empty() ? "" : where;
  throw RequestError(std::move(error));
}

ApiError error_of_request() {
  try {
    throw;
  } catch (const RequestError& error) {
    return error.error();
  } catch (const JsonFieldError& error) {
    ApiError out;
    out.code = kInvalidValue;
    out.message = printable(error.what(), kMaxMessageBytes);
    out.param = printable(error.path(), kMaxParamBytes);
    return out;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kDataLoss && error.code() != ErrorCode::kInvalidArgument) throw;
    ApiError out;
    out.code = kInvalidValue;
    out.message = printable(error.what(), kMaxMessageBytes);
    return out;
  }
}

ApiError unauthorized() {
  return made(401, "authentication_error", "invalid_api_key",
              "Authorization: expected a valid API key, found none or another one");
}

ApiError not_found(std::string_view method, std::string_view path) {
  return made(
      404, "invalid_request_error", "not_found",
      fmt::format("path: expected a route of this server, found {} {}", printable(method, 20), printable(path, 100)));
}

ApiError method_not_allowed(std::string_view method, std::string_view path, std::string_view allowed) {
  return made(
      405, "invalid_request_error", "method_not_allowed",
      fmt::format("method: expected {} for {}, found {}", allowed, printable(path, 100), printable(method, 20)));
}

ApiError body_too_large(uint64_t found_bytes, uint64_t limit_bytes) {
  return made(413, "invalid_request_error", "body_too_large",
              fmt::format("body: expected at most {} bytes, found {}", limit_bytes, found_bytes));
}

ApiError overloaded(std::string_view what, uint64_t found, uint64_t limit) {
  return made(429, "rate_limit_error", "overloaded",
              fmt::format("{}: expected room for this request, found {} of {} taken", what, found, limit));
}

ApiError unavailable(std::string_view state) {
  return made(503, "server_error", "unavailable", fmt::format("server: expected ready, found {}", state));
}

ApiError model_loading() {
  return made(503, "server_error", "model_loading",
              "server: expected ready, found loading; its weights are not there yet");
}

ApiError internal_error(std::string_view what) {
  return made(500, "server_error", "internal_error", printable(what, kMaxMessageBytes));
}

ApiError model_not_found(std::string_view name, const std::vector<std::string>& served) {
  const std::string expected = printable(fmt::format("{}", fmt::join(served, " or ")), 100);
  ApiError error = made(404, "invalid_request_error", kModelNotFound,
                        fmt::format("model: expected {}, found \"{}\"", expected, printable(name, 100)));
  error.param = "model";
  return error;
}

ApiError context_exceeded(int64_t num_prompt_tokens, int64_t max_tokens, int64_t max_model_len) {
  ApiError error = made(400, "invalid_request_error", kContextLength,
                        fmt::format("max_tokens: expected prompt and answer within {} tokens, found {} in the prompt "
                                    "and {} asked for",
                                    max_model_len, num_prompt_tokens, max_tokens));
  error.param = "max_tokens";
  return error;
}

std::string openai_error_body(const ApiError& error) {
  const JsonObject body{{"message", error.message},
                        {"type", error.type},
                        {"param", JsonText::or_null(error.param)},
                        {"code", JsonText::or_null(error.code)}};
  return JsonObject{{"error", body}}.text();
}

std::string anthropic_error_body(const ApiError& error) {
  const JsonObject body{{"type", anthropic_type(error.status)}, {"message", error.message}};
  return JsonObject{{"type", "error"}, {"error", body}}.text();
}

}  // namespace tessera::server
