// SPDX-License-Identifier: Apache-2.0
#include "usage.h"

#include <fmt/format.h>

#include <array>
#include <iostream>

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
  while (std::cin.read(part.data(), part.size()) || std::cin.gcount() > 0) {
    text.append(part.data(), static_cast<size_t>(std::cin.gcount()));
    if (text.size() > kMaxPromptBytes) {
      fail_usage(fmt::format("prompt: expected at most {} bytes on stdin, found more", kMaxPromptBytes));
    }
  }
  return text;
}

std::string NotEmpty::operator()(const std::string& value) const {
  return value.empty() ? fmt::format("expected {}, found \"\"", expected_) : "";
}

}  // namespace tessera::app
