// SPDX-License-Identifier: Apache-2.0
#include "console.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/strings.h"

namespace tessera::app {

namespace {

constexpr size_t kMaxLineBytes = 2000;

int g_result_errno = 0;  // of the first failure; one stdout, so one of these

}  // namespace

void print_note(std::string_view message) {
  // In one write: ranks of one machine share the stream.
  const std::string line = fmt::format("{}\n", message);
  std::fwrite(line.data(), 1, line.size(), stderr);
}

void print_error(std::string_view message) {
  print_note(fmt::format("tessera: {}", printable(message, kMaxLineBytes)));
}

void print_warning(std::string_view message) {
  print_note(fmt::format("warning: {}", message));
}

bool print_result(std::string_view text) {
  const bool is_written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  const bool is_flushed = std::fflush(stdout) == 0;
  if (is_written && is_flushed) return true;
  if (g_result_errno == 0) g_result_errno = errno;
  return false;
}

std::optional<std::string> result_fault() {
  if (g_result_errno == 0) return std::nullopt;
  return std::strerror(g_result_errno);
}

void ConsoleLog::write(LogLevel level, std::string_view message) {
  if (level == LogLevel::kWarning) return print_warning(message);
  if (level == LogLevel::kInfo && !is_quiet_) print_note(message);
}

}  // namespace tessera::app
