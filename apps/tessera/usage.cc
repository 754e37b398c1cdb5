// SPDX-License-Identifier: Apache-2.0
#include "usage.h"

#include <fmt/format.h>

#include <iostream>
#include <iterator>

#include "base/error.h"

namespace tessera::app {

namespace {

constexpr size_t kMaxPromptBytes = 64 << 20;

}  // namespace

void fail_usage(const std::string& message) {
  fail(ErrorCode::kInvalidArgument, message);
}

std::string read_standard_input() {
  std::string text(std::istreambuf_iterator<char>(std::cin), {});
  if (text.size() > kMaxPromptBytes)
    fail_usage(fmt::format("prompt: expected at most {} bytes, found {}", kMaxPromptBytes, text.size()));
  // A text file's last newline is not part of the question.
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

}  // namespace tessera::app
