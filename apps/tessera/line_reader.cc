// SPDX-License-Identifier: Apache-2.0
#include "line_reader.h"

#include <histedit.h>
#include <langinfo.h>
#include <unistd.h>

#include <cerrno>
#include <clocale>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "base/env.h"
#include "base/strings.h"
#include "interrupt.h"

namespace tessera::app {

namespace {

constexpr int kHistoryLines = 1000;
constexpr size_t kMaxLineBytes = 16 << 20;

// Bytes of stdin. What a signal handler does decides whether a read goes on.
class Input {
 public:
  enum class Outcome { kByte, kInterrupted, kEnd };
  Outcome next(char& byte) {
    if (at_ == size_) {
      ssize_t count = 0;
      do {
        count = ::read(STDIN_FILENO, buffer_, sizeof buffer_);
      } while (count < 0 && errno == EINTR && !interrupted());
      if (count < 0 && errno == EINTR) return Outcome::kInterrupted;
      if (count <= 0) return Outcome::kEnd;
      at_ = 0, size_ = static_cast<size_t>(count);
    }
    byte = buffer_[at_++];
    return Outcome::kByte;
  }

 private:
  char buffer_[4096];
  size_t at_ = 0, size_ = 0;
};

class PipeReader final : public LineReader {
 public:
  Outcome read(const std::string&, std::string& line) override {
    line.clear();
    for (char byte = 0;;) {
      switch (input_.next(byte)) {
        case Input::Outcome::kInterrupted:
          return Outcome::kInterrupted;
        case Input::Outcome::kEnd:
          return line.empty() ? Outcome::kEnd : Outcome::kLine;
        case Input::Outcome::kByte:
          break;
      }
      if (byte == '\n') return Outcome::kLine;
      if (line.size() < kMaxLineBytes) line += byte;
    }
  }
  void remember(const std::string&) override {}

 private:
  Input input_;
};

class TerminalReader final : public LineReader {
 public:
  explicit TerminalReader(std::string history_path) : history_path_(std::move(history_path)) {
    // libedit thinks in wide characters; without a UTF-8 locale it would refuse most of what can be typed.
    if (std::setlocale(LC_CTYPE, "") == nullptr || std::strcmp(nl_langinfo(CODESET), "UTF-8") != 0)
      std::setlocale(LC_CTYPE, "C.UTF-8");
    history_ = history_init();
    HistEvent event;
    history(history_, &event, H_SETSIZE, kHistoryLines);
    history(history_, &event, H_SETUNIQUE, 1);
    if (!history_path_.empty()) history(history_, &event, H_LOAD, history_path_.c_str());
    edit_ = el_init("tessera", stdin, isatty(STDOUT_FILENO) != 0 ? stdout : stderr, stderr);
    el_set(edit_, EL_CLIENTDATA, this);
    el_set(edit_, EL_PROMPT, prompt_of);
    el_set(edit_, EL_EDITOR, "emacs");
    el_set(edit_, EL_HIST, history, history_);
    el_set(edit_, EL_GETCFN, read_character);
    el_source(edit_, nullptr);
  }
  ~TerminalReader() override {
    el_end(edit_);
    history_end(history_);
  }

  Outcome read(const std::string& prompt, std::string& line) override {
    prompt_ = prompt;
    is_interrupted_ = false;
    int count = 0;
    // libedit would do it after the prompt is shown; a Ctrl-D typed in between would be the line discipline's.
    el_set(edit_, EL_PREP_TERM, 1);
    const char* text = el_gets(edit_, &count);
    if (is_interrupted_) {
      std::fputs("^C\n", stderr);
      return Outcome::kInterrupted;
    }
    if (text == nullptr || count <= 0) return Outcome::kEnd;
    line.assign(text, static_cast<size_t>(count));
    if (line.ends_with('\n')) line.pop_back();
    return Outcome::kLine;
  }

  void remember(const std::string& line) override {
    HistEvent event;
    history(history_, &event, H_ENTER, line.c_str());
    if (!history_path_.empty()) history(history_, &event, H_SAVE, history_path_.c_str());
  }

 private:
  static TerminalReader& self(EditLine* edit) {
    void* data = nullptr;
    el_get(edit, EL_CLIENTDATA, &data);
    return *static_cast<TerminalReader*>(data);
  }
  static char* prompt_of(EditLine* edit) { return self(edit).prompt_.data(); }

  // libedit's own reader tries again after a signal; this one ends the line at Ctrl-C. 1, 0 at the end, -1 else.
  static int read_character(EditLine* edit, wchar_t* out) {
    TerminalReader& reader = self(edit);
    std::string bytes;
    do {
      char byte = 0;
      const Input::Outcome outcome = reader.input_.next(byte);
      reader.is_interrupted_ = outcome == Input::Outcome::kInterrupted;
      if (outcome != Input::Outcome::kByte) return reader.is_interrupted_ ? -1 : 0;
      bytes += byte;
    } while (complete_utf8_prefix(bytes) == 0);
    size_t at = 0;
    *out = static_cast<wchar_t>(next_code_point(bytes, at));
    return 1;
  }

  std::string history_path_, prompt_;
  Input input_;
  bool is_interrupted_ = false;
  History* history_ = nullptr;
  EditLine* edit_ = nullptr;
};

}  // namespace

std::unique_ptr<LineReader> make_line_reader(const std::string& history_path) {
  if (isatty(STDIN_FILENO) == 0) return std::make_unique<PipeReader>();
  return std::make_unique<TerminalReader>(history_path);
}

std::string default_history_path() {
  std::filesystem::path folder;
  if (const auto state = env_value("XDG_STATE_HOME")) {
    folder = *state;
  } else if (const auto home = env_value("HOME")) {
    folder = std::filesystem::path(*home) / ".local/state";
  } else {
    return "";
  }
  folder /= "tessera";
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  return error ? "" : (folder / "history").string();
}

}  // namespace tessera::app
