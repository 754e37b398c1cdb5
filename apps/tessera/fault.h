// SPDX-License-Identifier: Apache-2.0
#pragma once
// What ends the program where it can't do what was asked.
#include <string>

#include "verb.h"

namespace tessera::app {

struct Fault {
  int code = kExitFailure;  // the exit code
  std::string message;      // a line that says why
};

// Of the std::exception that is being handled.
Fault current_fault();

}  // namespace tessera::app
