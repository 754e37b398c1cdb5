// SPDX-License-Identifier: Apache-2.0
#include "console.h"

#include <cstdio>

#include "base/strings.h"

namespace tessera::app {

namespace {

constexpr size_t kMaxLineBytes = 2000;

}  // namespace

void print_note(std::string_view message) {
  std::fwrite(message.data(), 1, message.size(), stderr);
  std::fputc('\n', stderr);
}

void print_error(std::string_view message) {
  std::fputs("tessera: ", stderr);
  print_note(printable(message, kMaxLineBytes));
}

bool print_result(std::string_view text) {
  const bool is_written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  return std::fflush(stdout) == 0 && is_written;
}

void ConsoleLog::write(LogLevel level, std::string_view message) {
  if (level == LogLevel::kDebug || (is_quiet_ && level != LogLevel::kWarning)) return;
  print_note(message);
}

}  // namespace tessera::app
