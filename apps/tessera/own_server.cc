// SPDX-License-Identifier: Apache-2.0
#include "own_server.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include "base/error.h"
#include "interrupt.h"
#include "verb.h"

namespace tessera::app {

namespace {

constexpr int kEndTries = 1000;
constexpr useconds_t kEndMicroseconds = 10000;

// The first line of what is written into `fd`; empty at its end.
std::string first_line(int fd) {
  std::string line;
  for (char c = 0; !interrupted();) {
    const ssize_t count = read(fd, &c, 1);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return "";
    if (c == '\n') return line;
    line += c;
  }
  fail(ErrorCode::kCancelled, "stopped while the server was started");
}

}  // namespace

OwnServer::OwnServer(const std::vector<std::string>& flags) {
  std::vector<std::string> words = {"/proc/self/exe", "serve", "--host", "127.0.0.1", "--port", "0", "--quiet"};
  words.insert(words.end(), flags.begin(), flags.end());
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) fail(ErrorCode::kResourceExhausted, fmt::format("a pipe: {}", std::strerror(errno)));
  process_ = fork();
  if (process_ == 0) {
    // It goes with this process, and Ctrl-C is this process' alone.
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    setpgid(0, 0);
    dup2(ends[1], STDOUT_FILENO);
    execv(arguments[0], arguments.data());
    _exit(kExitFailure);
  }
  close(ends[1]);
  try {
    if (process_ < 0) fail(ErrorCode::kResourceExhausted, fmt::format("a process: {}", std::strerror(errno)));
    url_ = first_line(ends[0]);
  } catch (const Error&) {
    close(ends[0]);
    end();
    throw;
  }
  // The rest, a curl to paste, is in the pipe's buffer or lost; the server ignores SIGPIPE.
  close(ends[0]);
  if (!url_.empty()) return;
  end();
  fail(ErrorCode::kInvalidArgument, "tessera serve ended before it took requests; what it said is above");
}

OwnServer::~OwnServer() {
  end();
}

void OwnServer::end() {
  if (process_ <= 0) return;
  kill(process_, SIGTERM);
  for (int i = 0; i < kEndTries; ++i) {
    if (waitpid(process_, nullptr, WNOHANG) == process_) return;
    usleep(kEndMicroseconds);
    // A second signal ends answers that still run.
    if (i == kEndTries / 4) kill(process_, SIGTERM);
  }
  kill(process_, SIGKILL);
  waitpid(process_, nullptr, 0);
}

}  // namespace tessera::app
