// SPDX-License-Identifier: Apache-2.0
#pragma once
// Errors. Exceptions end an operation (load, build, bind); what a single request may cause in normal service is a
// value. A message is one line: what was wrong, where (file, tensor or field), what was expected, what was found.
#include <stdexcept>
#include <string>
#include <string_view>

namespace tessera {

enum class ErrorCode {
  kInvalidArgument,    // the caller or the user asked for something impossible
  kNotFound,           // a file, tensor or field is missing
  kDataLoss,           // a file says something that it must not say: truncated, malformed, inconsistent
  kUnsupported,        // well-formed, but not something this program can do
  kResourceExhausted,  // it does not fit; the message says how much is missing
  kCancelled,          // the user stopped it
  kDeviceError,        // a device or its driver failed
  kNotFinite,          // NaN or infinity where numbers are due: damaged weights, or a kernel at fault
  kInternal,           // a broken invariant of ours
};

std::string_view to_string(ErrorCode code);

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

[[noreturn]] void fail(ErrorCode code, const std::string& message);

// Throws kDataLoss: "FILE: WHAT: expected EXPECTED, found FOUND". Strings from files may hold anything: control
// characters and invalid UTF-8 are escaped, and long ones cut.
[[noreturn]] void fail_data(std::string_view file, std::string_view what, std::string_view expected,
                            std::string_view found);

namespace detail {
[[noreturn]] void check_failed(const char* file, int line, const char* expression, const std::string& values);
}  // namespace detail

}  // namespace tessera

// A broken invariant of ours; throws kInternal with the place. `values` is a std::string, built only on failure.
#define TESSERA_CHECK(condition, values)                                                         \
  do {                                                                                           \
    if (!(condition)) ::tessera::detail::check_failed(__FILE__, __LINE__, #condition, (values)); \
  } while (false)
