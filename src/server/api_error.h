// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a request is told when it fails: an HTTP status and the parts of OpenAI's and Anthropic's error bodies. Parsing
// returns it as a value; inside a parser it travels as an exception.
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.h"

namespace tessera::server {

struct ApiError {
  int status = 400;
  std::string type = "invalid_request_error";
  std::string code;     // "" becomes null
  std::string message;  // one line: field, expected, found
  std::string param;    // the field, such as messages[0].content; "" becomes null
};

// Codes of errors in a request.
inline constexpr std::string_view kMalformedJson = "malformed_json";  // the body is not one strict JSON value
inline constexpr std::string_view kInvalidValue = "invalid_value";    // a field against the schema
inline constexpr std::string_view kMissingField = "missing_required_parameter";
inline constexpr std::string_view kUnsupported = "unsupported_parameter";  // a field that this server cannot honour
inline constexpr std::string_view kConflict = "conflicting_parameters";    // fields that do not go together
inline constexpr std::string_view kModelNotFound = "model_not_found";
inline constexpr std::string_view kContextLength = "context_length_exceeded";

// A value, or why there is none.
template <class T>
class Reply {
 public:
  Reply(T value) : value_(std::move(value)) {}
  Reply(ApiError error) : value_(std::move(error)) {}
  bool ok() const { return value_.index() == 0; }
  // The value; only where ok().
  const T& value() const { return std::get<0>(value_); }
  T& value() { return std::get<0>(value_); }
  // The error; only where not ok().
  const ApiError& error() const { return std::get<1>(value_); }

 private:
  std::variant<T, ApiError> value_;
};

// An ApiError on its way out of a parser.
class RequestError : public Error {
 public:
  explicit RequestError(ApiError error) : Error(ErrorCode::kDataLoss, error.message), error_(std::move(error)) {}
  const ApiError& error() const { return error_; }

 private:
  ApiError error_;
};

// Throws RequestError with status 400, naming the field: "FIELD: expected EXPECTED, found FOUND".
[[noreturn]] void fail_field(std::string_view code, const std::string& field, std::string_view expected,
                             std::string_view found);

// The exception that is being handled, as what the client is told: RequestError and JsonFieldError name their field,
// other errors that blame the input give 400 without one. Everything else is thrown on: it is ours, not the request's.
ApiError error_of_request();

// `read()`, with the errors that blame the request turned into a value.
template <class Read>
auto reply_of(const Read& read) -> Reply<decltype(read())> {
  try {
    return read();
  } catch (const Error&) {
    return error_of_request();
  }
}

// Errors that do not come from a body. Messages say what was found and allowed, never what a secret looks like.
ApiError unauthorized();                                             // 401
ApiError not_found(std::string_view method, std::string_view path);  // 404, no such route
// 405; `allowed`: the methods that there are.
ApiError method_not_allowed(std::string_view method, std::string_view path, std::string_view allowed);
ApiError body_too_large(uint64_t found_bytes, uint64_t limit_bytes);         // 413
ApiError overloaded(std::string_view what, uint64_t found, uint64_t limit);  // 429; the answer carries Retry-After
ApiError unavailable(std::string_view state);                                // 503: draining
ApiError model_loading();                                                    // 503; the answer carries Retry-After
ApiError internal_error(std::string_view what);                              // 500
// 404: the request names a model that is not served.
ApiError model_not_found(std::string_view name, const std::vector<std::string>& served);
// 400 with both numbers: prompt and answer do not fit into the context.
ApiError context_exceeded(int64_t num_prompt_tokens, int64_t max_tokens, int64_t max_model_len);

// {"error": {"message", "type", "param", "code"}}.
std::string openai_error_body(const ApiError& error);
// {"type": "error", "error": {"type", "message"}}; the type follows from the status.
std::string anthropic_error_body(const ApiError& error);

}  // namespace tessera::server
