// SPDX-License-Identifier: Apache-2.0
#pragma once
// What users ask for on the command line, refused in one place.
#include <string>

namespace tessera::app {

// Throws kInvalidArgument, which ends the program with exit code 2.
[[noreturn]] void fail_usage(const std::string& message);

// All of stdin, as UTF-8 is expected of it; a last newline is not part of it. Throws above 64 MiB.
std::string read_standard_input();

}  // namespace tessera::app
