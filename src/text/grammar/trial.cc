// SPDX-License-Identifier: Apache-2.0
#include "text/grammar/trial.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <new>
#include <stdexcept>

#include "base/error.h"

namespace tessera::text {

namespace {

enum class Verdict : char { kDone = 'd', kTime = 't', kMemory = 'm', kCrash = 'c', kBusy = 'b' };
constexpr int kOutOfMemory = 2;  // exit status
constexpr int kClockTimes = 4;   // of processor time: what the clock may show
constexpr int kSocket = 3;       // of the process of trials

bool send_all(int socket, const char* data, size_t size) {
  while (size > 0) {
    const ssize_t count = send(socket, data, size, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    data += count, size -= static_cast<size_t>(count);
  }
  return true;
}

bool receive_all(int socket, char* data, size_t size) {
  while (size > 0) {
    const ssize_t count = recv(socket, data, size, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    data += count, size -= static_cast<size_t>(count);
  }
  return true;
}

void append(std::string& out, std::string_view text) {
  const uint64_t size = text.size();
  out.append(reinterpret_cast<const char*>(&size), sizeof(size));
  out += text;
}

std::string take(std::string_view& in) {
  uint64_t size = 0;
  in.copy(reinterpret_cast<char*>(&size), sizeof(size));
  std::string out(in.substr(sizeof(size), size));
  in.remove_prefix(sizeof(size) + size);
  return out;
}

std::string packed(const GrammarDefinition& definition) {
  std::string body;
  body += static_cast<char>(definition.content);
  body += static_cast<char>(definition.allows_parallel);
  body += static_cast<char>(definition.is_in_block);
  append(body, definition.text);
  for (const CallableTool& tool : definition.tools) {
    append(body, tool.name);
    append(body, tool.parameters);
    body += static_cast<char>(tool.is_strict);
  }
  std::string out;
  append(out, body);
  return out;
}

GrammarDefinition unpacked(std::string_view body) {
  GrammarDefinition definition;
  definition.content = static_cast<GrammarDefinition::Content>(body[0]);
  definition.allows_parallel = body[1] != 0;
  definition.is_in_block = body[2] != 0;
  body.remove_prefix(3);
  definition.text = take(body);
  while (!body.empty()) {
    CallableTool tool;
    tool.name = take(body);
    tool.parameters = take(body);
    tool.is_strict = body[0] != 0;
    body.remove_prefix(1);
    definition.tools.push_back(std::move(tool));
  }
  return definition;
}

void set_limit(int what, size_t value) {
  const rlimit limit{value, value};
  setrlimit(what, &limit);
}

void limit_memory(size_t bytes) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  unsigned long pages = 0;
  if (FILE* file = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(file, "%lu", &pages) != 1) pages = 0;
    std::fclose(file);
  }
  set_limit(RLIMIT_AS, pages * static_cast<size_t>(sysconf(_SC_PAGESIZE)) + bytes);
#else
  (void)bytes;  // their shadow memory is all of the address space
#endif
}

[[noreturn]] void try_it(const TrialWork& work, const TrialLimits& limits, const std::string& body) {
  for (const int number : {SIGSEGV, SIGABRT, SIGBUS, SIGXCPU, SIGALRM}) signal(number, SIG_DFL);
  const rlimit cpu{static_cast<rlim_t>(limits.seconds), static_cast<rlim_t>(limits.seconds) + 1};
  setrlimit(RLIMIT_CPU, &cpu);
  set_limit(RLIMIT_CORE, 0);
  limit_memory(limits.bytes);
  alarm(static_cast<unsigned>(kClockTimes * limits.seconds));
  try {
    work.run(unpacked(body));
  } catch (const std::bad_alloc&) {
    _exit(kOutOfMemory);
  } catch (const std::exception&) {
    // The process that asked will see the same.
  }
  _exit(0);
}

Verdict verdict_of(int status) {
  if (WIFSIGNALED(status)) {
    const int number = WTERMSIG(status);
    // The clock ran out before the processor's time: others had it. And SIGKILL is never the trial's own limit, which
    // SIGXCPU comes before: it says nothing of the definition either.
    if (number == SIGALRM || number == SIGKILL) return Verdict::kBusy;
    return number == SIGXCPU ? Verdict::kTime : Verdict::kCrash;
  }
  return WEXITSTATUS(status) == 0              ? Verdict::kDone
         : WEXITSTATUS(status) == kOutOfMemory ? Verdict::kMemory
                                               : Verdict::kCrash;
}

// The process of trials: one thread, which forks for each. Ends when the other side has.
[[noreturn]] void serve(const TrialWork& work, const TrialLimits& limits, int socket) {
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE}) signal(number, SIG_IGN);
  signal(SIGCHLD, SIG_DFL);
  const int null = open("/dev/null", O_RDWR);
  for (int fd = 0; fd < kSocket; ++fd) dup2(null, fd);
  // Nothing else that the process has open must stay open with this one.
  dup2(socket, kSocket);
  closefrom(kSocket + 1);
  for (;;) {
    uint64_t size = 0;
    if (!receive_all(kSocket, reinterpret_cast<char*>(&size), sizeof(size))) _exit(0);
    std::string body(size, '\0');
    if (!receive_all(kSocket, body.data(), size)) _exit(0);
    const pid_t child = fork();
    if (child == 0) try_it(work, limits, body);
    int status = 0;
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    const Verdict verdict = child > 0 ? verdict_of(status) : Verdict::kBusy;
    if (!send_all(kSocket, reinterpret_cast<const char*>(&verdict), 1)) _exit(0);
  }
}

}  // namespace

Trial::Trial(const TrialWork& work, const TrialLimits& limits) : work_(work), limits_(limits) {
  start();
}

Trial::~Trial() {
  stop();
}

void Trial::start() {
  int sockets[2] = {-1, -1};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) return;
  process_ = fork();
  if (process_ == 0) serve(work_, limits_, sockets[1]);
  close(sockets[1]);
  socket_ = sockets[0];
  if (process_ < 0) stop();
}

void Trial::stop() {
  if (socket_ >= 0) close(socket_);
  socket_ = -1;
  if (process_ <= 0) return;
  kill(process_, SIGKILL);  // a trial under way ends at its own limits
  while (waitpid(process_, nullptr, 0) < 0 && errno == EINTR) {
  }
  process_ = -1;
}

void Trial::run(const GrammarDefinition& definition) {
  const std::lock_guard<std::mutex> hold(lock_);
  if (socket_ < 0) start();
  const std::string message = packed(definition);
  char answer = 0;
  pollfd wait{socket_, POLLIN, 0};
  const bool is_sent = socket_ >= 0 && send_all(socket_, message.data(), message.size());
  int num_ready = 0;
  while (is_sent && (num_ready = poll(&wait, 1, (kClockTimes * limits_.seconds + 5) * 1000)) < 0 && errno == EINTR) {
  }
  const bool is_answered = num_ready > 0 && receive_all(socket_, &answer, 1);
  if (!is_answered) {
    stop();
    fail(ErrorCode::kResourceExhausted, "grammars: the process that tries them is gone; ask again");
  }
  switch (static_cast<Verdict>(answer)) {
    case Verdict::kTime:
      fail(ErrorCode::kInvalidArgument,
           fmt::format("expected a grammar that is compiled within {} s, found a slower one", limits_.seconds));
    case Verdict::kMemory:
      fail(ErrorCode::kInvalidArgument,
           fmt::format("expected a grammar that is compiled in {} MiB, found a larger one", limits_.bytes >> 20));
    case Verdict::kCrash:
      fail(ErrorCode::kInvalidArgument, "expected a grammar that can be compiled, found one that is nested too deeply");
    case Verdict::kBusy:
      fail(ErrorCode::kResourceExhausted, "grammars: this one could not be compiled beside other work; ask again");
    case Verdict::kDone:
      return;
  }
}

}  // namespace tessera::text
