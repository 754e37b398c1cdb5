// SPDX-License-Identifier: Apache-2.0
#include "usage.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace tessera::app {

namespace {

constexpr size_t kMaxPromptBytes = 64 << 20;

}  // namespace

void fail_usage(const std::string& message) {
  fail(ErrorCode::kInvalidArgument, message);
}

std::string read_standard_input() {
  std::string text;
  std::array<char, 65536> part{};
  for (;;) {
    const ssize_t count = ::read(STDIN_FILENO, part.data(), part.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail_usage(fmt::format("prompt: cannot read stdin: {}", std::strerror(errno)));
    if (count == 0) return text;
    text.append(part.data(), static_cast<size_t>(count));
    if (text.size() > kMaxPromptBytes) {
      fail_usage(fmt::format("prompt: expected at most {} bytes on stdin, found more", kMaxPromptBytes));
    }
  }
}

std::string NotEmpty::operator()(const std::string& value) const {
  return value.empty() ? fmt::format("expected {}, found \"\"", expected_) : "";
}

}  // namespace tessera::app
