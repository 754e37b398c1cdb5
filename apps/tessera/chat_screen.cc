// SPDX-License-Identifier: Apache-2.0
#include "chat_screen.h"

#include <unistd.h>

#include <cstdint>
#include <cstdio>

#include "base/env.h"
#include "base/strings.h"
#include "console.h"

namespace tessera::app {

namespace {

constexpr const char *kDim = "\033[2m", *kPlain = "\033[0m";

// A model's words must not move the cursor or retitle the window.
std::string without_controls(std::string_view text) {
  std::string out;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find_first_of("\n\t", begin), text.size());
    out += printable(text.substr(begin, end - begin), SIZE_MAX);
    if (end < text.size()) out += text[end];
    begin = end + 1;
  }
  return out;
}

}  // namespace

ChatScreen::ChatScreen()
    : is_terminal_(isatty(STDOUT_FILENO) != 0), has_colors_(is_terminal_ && !env_value("NO_COLOR")) {}

void ChatScreen::write(std::string_view text) {
  if (text.empty()) return;
  last_ = text.back();
  if (!print_result(is_terminal_ ? without_controls(text) : std::string(text))) is_broken_ = true;
}

void ChatScreen::reasoning(std::string_view text) {
  if (text.empty()) return;
  if (!is_terminal_) {
    std::fwrite(text.data(), 1, text.size(), stderr);
    is_in_reasoning_ = true;
    return;
  }
  if (!is_in_reasoning_) print_result(has_colors_ ? kDim : "<think>");
  is_in_reasoning_ = true;
  write(text);
}

void ChatScreen::end_reasoning() {
  if (!is_in_reasoning_) return;
  is_in_reasoning_ = false;
  if (!is_terminal_) {
    std::fputc('\n', stderr);
  } else {
    print_result(has_colors_ ? kPlain : "</think>");
    print_result("\n\n");
  }
  last_ = '\n';
}

void ChatScreen::content(std::string_view text) {
  end_reasoning();
  write(text);
}

void ChatScreen::end_answer() {
  end_reasoning();
  if (last_ != '\n') print_result("\n");
  last_ = '\n';
}

void ChatScreen::note(const std::string& text) const {
  const bool dims = has_colors_ && isatty(STDERR_FILENO) != 0;
  print_note(dims ? kDim + text + kPlain : text);
}

}  // namespace tessera::app
