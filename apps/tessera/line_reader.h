// SPDX-License-Identifier: Apache-2.0
#pragma once
// Lines that a person types, or that a pipe holds.
#include <memory>
#include <string>

namespace tessera::app {

class LineReader {
 public:
  enum class Outcome { kLine, kInterrupted, kEnd };

  virtual ~LineReader() = default;
  // One line without its end. kInterrupted: Ctrl-C was pressed (interrupt.h's flag stays set). kEnd: Ctrl-D on an empty
  // line, or the end of the file.
  virtual Outcome read(const std::string& prompt, std::string& line) = 0;
  // Puts a line where the up arrow finds it, in the history file too.
  virtual void remember(const std::string& line) = 0;
};

// On a terminal: editing and history through libedit, the history kept in `history_path` (empty: not kept). Else plain
// lines without a prompt. Ctrl-C is seen after watch_interrupt().
std::unique_ptr<LineReader> make_line_reader(const std::string& history_path);

// $XDG_STATE_HOME/tessera/history or ~/.local/state/tessera/history, its folder made; empty where there is no place.
std::string default_history_path();

}  // namespace tessera::app
