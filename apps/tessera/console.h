// SPDX-License-Identifier: Apache-2.0
#pragma once
// The terminal: messages on stderr, results on stdout.
#include <optional>
#include <string>
#include <string_view>

#include "base/log.h"

namespace tessera::app {

// One line on stderr, "tessera: MESSAGE".
void print_error(std::string_view message);
// One line on stderr.
void print_note(std::string_view message);
// One line on stderr, "warning: MESSAGE": nothing ends, but not all is as it was asked for, or as it should be.
void print_warning(std::string_view message);
// Result text on stdout, flushed. False once nobody reads any more.
bool print_result(std::string_view text);
// Why writing results failed, once it has.
std::optional<std::string> result_fault();

class ConsoleLog final : public LogSink {
 public:
  explicit ConsoleLog(bool is_quiet) : is_quiet_(is_quiet) {}
  void write(LogLevel level, std::string_view message) override;

 private:
  bool is_quiet_;
};

}  // namespace tessera::app
