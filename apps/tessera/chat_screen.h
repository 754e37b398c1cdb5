// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a chat shows: answers on stdout, reasoning apart from them, everything else on stderr.
#include <string>
#include <string_view>

namespace tessera::app {

class ChatScreen {
 public:
  ChatScreen();

  // Parts of an answer as they come. On a terminal reasoning is dimmed (with NO_COLOR: between <think> and </think>),
  // and control characters are shown as \xNN; elsewhere reasoning goes to stderr and content is written as it is.
  void reasoning(std::string_view text);
  void content(std::string_view text);
  // Ends the answer's last line.
  void end_answer();
  // One line on stderr, dimmed on a terminal.
  void note(const std::string& text) const;

  // Nobody reads stdout any more.
  bool is_broken() const { return is_broken_; }

 private:
  void write(std::string_view text);
  void end_reasoning();

  bool is_terminal_, has_colors_;
  bool is_in_reasoning_ = false, is_broken_ = false;
  char last_ = '\n';
};

}  // namespace tessera::app
