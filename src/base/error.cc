// SPDX-License-Identifier: Apache-2.0
#include "base/error.h"

#include <fmt/format.h>

#include "base/strings.h"

namespace tessera {

std::string_view to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return "invalid argument";
    case ErrorCode::kNotFound:
      return "not found";
    case ErrorCode::kDataLoss:
      return "bad data";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kResourceExhausted:
      return "does not fit";
    case ErrorCode::kCancelled:
      return "cancelled";
    case ErrorCode::kDeviceError:
      return "device error";
    case ErrorCode::kNotFinite:
      return "not finite";
    case ErrorCode::kInternal:
      return "internal error";
  }
  return "unknown";
}

void fail(ErrorCode code, const std::string& message) {
  throw Error(code, message);
}

void fail_data(std::string_view file, std::string_view what, std::string_view expected, std::string_view found) {
  fail(ErrorCode::kDataLoss, fmt::format("{}: {}: expected {}, found {}", printable(file), printable(what),
                                         printable(expected), printable(found)));
}

void detail::check_failed(const char* file, int line, const char* expression, const std::string& values) {
  fail(ErrorCode::kInternal, fmt::format("{}:{}: check failed: {} ({})", file, line, expression, values));
}

}  // namespace tessera
