// SPDX-License-Identifier: Apache-2.0
#pragma once
// Every environment variable that the program reads, in one list. They are for diagnosis; settings are flags.
#include <optional>
#include <span>
#include <string>

namespace tessera {

struct EnvVariable {
  const char* name;
  const char* meaning;
};

// The whole list, for `--help-all` and the documentation.
std::span<const EnvVariable> env_variables();

// The value of a variable of the list, or nothing where it is unset or empty. Throws kInternal for one not listed.
std::optional<std::string> env_value(const char* name);

}  // namespace tessera
