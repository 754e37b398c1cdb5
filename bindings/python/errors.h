// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tessera's errors as Python's: classes of tessera/_errors.py, with our messages.
#include <nanobind/nanobind.h>

#include "base/log.h"
#include "bindings/c/tessera.h"

namespace tessera::python {

namespace nb = nanobind;

// tessera::Error becomes tessera.Error or one of its subclasses from here on.
void register_errors();

// Throws what the calling thread's last failed call of the C interface said, unless it did not fail.
void check(tessera_status status);

// Asks Python between pieces of long work whether Ctrl-C was pressed, and throws what its handler raised. For work that
// runs without the GIL; calls come from the thread that began it.
class SignalCheck final : public ProgressSink {
 public:
  void begin(std::string_view, uint64_t, std::string_view) override { look(); }
  void advance(uint64_t) override { look(); }
  void end() override {}

 private:
  void look();
};

}  // namespace tessera::python
