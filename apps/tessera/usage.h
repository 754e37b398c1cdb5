// SPDX-License-Identifier: Apache-2.0
#pragma once
// What users ask for on the command line, refused in one place.
#include <string>

namespace tessera::app {

// Throws kInvalidArgument, which ends the program with exit code 2.
[[noreturn]] void fail_usage(const std::string& message);

// All of stdin, as it is. Throws above 64 MiB, without reading further.
std::string read_standard_input();

// A check for CLI11 options: the value that was given is not empty (as from an unset shell variable).
class NotEmpty {
 public:
  explicit NotEmpty(const char* expected) : expected_(expected) {}
  // "" where the value is fine, else what is wrong with it.
  std::string operator()(const std::string& value) const;

 private:
  const char* expected_;
};
inline NotEmpty not_empty(const char* expected) {
  return NotEmpty(expected);
}

}  // namespace tessera::app
