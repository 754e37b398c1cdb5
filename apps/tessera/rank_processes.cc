// SPDX-License-Identifier: Apache-2.0
#include "rank_processes.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <thread>

#include "base/error.h"
#include "base/file.h"
#include "base/strings.h"

extern char** environ;

namespace tessera::app {

namespace {

constexpr double kKilledSeconds = 1;
constexpr const char* kSecretName = "rank-secret";
constexpr std::string_view kDescriptors = "/dev/fd/";

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

// This program's own arguments, with the secret's file behind the verb.
std::vector<std::string> arguments_with(const std::string& verb, const std::string& secret_file) {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string all{std::istreambuf_iterator<char>(file), {}};
  std::vector<std::string> arguments;
  for (const std::string_view item : split(std::string_view(all).substr(0, all.empty() ? 0 : all.size() - 1), '\0')) {
    arguments.emplace_back(item);
  }
  TESSERA_CHECK(!arguments.empty(), "the program's name");
  const auto place = std::find(arguments.begin() + 1, arguments.end(), verb);  // the program may have any name
  TESSERA_CHECK(place != arguments.end(), "the verb among the arguments");
  arguments.insert(place + 1, {"--rank-secret-file", secret_file});
  return arguments;
}

// Of this process, but for what says which rank it is.
std::vector<std::string> environment_with(const std::map<std::string, std::string>& changes) {
  std::vector<std::string> variables;
  for (char** one = environ; *one != nullptr; ++one) {
    const std::string_view text(*one);
    if (!changes.contains(std::string(text.substr(0, text.find('='))))) variables.emplace_back(text);
  }
  for (const auto& [name, value] : changes) variables.push_back(name + "=" + value);
  return variables;
}

std::optional<int> number_of(std::string_view text) {
  int number = -1;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || rest != text.data() + text.size()) return std::nullopt;
  return number;
}

[[noreturn]] void fail_start(const char* what) {
  fail(ErrorCode::kResourceExhausted,
       fmt::format("can't start a further rank: {}: {}", what, std::generic_category().message(errno)));
}

}  // namespace

void RankProcesses::start(const std::string& verb, int world, int port, const std::string& secret) {
  world_ = world;
  // Ignored, as some supervisors leave it, nobody would hear how a rank ended.
  std::signal(SIGCHLD, SIG_DFL);
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0) fail_start("pipe");
  words_ = comm::Socket(ends[0]);
  const comm::Socket their_words(ends[1]);
  // In memory, where nobody else's command line or environment shows it; behind it the descriptor of their words.
  const comm::Socket secret_file(memfd_create(kSecretName, 0));
  const std::string handed = fmt::format("{}\n{}", secret, their_words.descriptor());
  if (!secret_file.is_open() || write(secret_file.descriptor(), handed.data(), handed.size()) < 0) fail_start("memfd");
  std::vector<std::string> arguments =
      arguments_with(verb, fmt::format("{}{}", kDescriptors, secret_file.descriptor()));
  const std::vector<char*> argument_list = pointers_to(arguments);
  const pid_t parent = getpid();
  for (int rank = 1; rank < world; ++rank) {
    std::vector<std::string> environment = environment_with({{"RANK", std::to_string(rank)},
                                                             {"WORLD_SIZE", std::to_string(world)},
                                                             {"LOCAL_RANK", std::to_string(rank)},
                                                             {"LOCAL_WORLD_SIZE", std::to_string(world)},
                                                             {"MASTER_ADDR", "127.0.0.1"},
                                                             {"MASTER_PORT", std::to_string(port)}});
    const std::vector<char*> environment_list = pointers_to(environment);
    const pid_t id = fork();
    if (id < 0) fail_start("fork");
    if (id > 0) {
      processes_.push_back({rank, id});
      continue;
    }
    // Until it has joined nothing else tells it that rank 0 has ended.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(0);
    fcntl(their_words.descriptor(), F_SETFD, 0);  // theirs: exec leaves it open
    // Results and input are rank 0's.
    const int nothing = open("/dev/null", O_RDWR);
    dup2(nothing, STDIN_FILENO), dup2(nothing, STDOUT_FILENO);
    if (nothing > STDERR_FILENO) close(nothing);
    execve("/proc/self/exe", argument_list.data(), environment_list.data());
    _exit(127);
  }
}

bool RankProcesses::has_ended(Process& process) noexcept {
  if (process.id == 0) return true;
  const pid_t ended = waitpid(process.id, &process.status, WNOHANG);
  if (ended == process.id || (ended < 0 && errno == ECHILD)) process.id = 0;
  return process.id == 0;
}

std::string RankProcesses::fault() {
  std::string why = first_end();
  if (!why.empty()) abandon();
  return why;
}

// Why it ended; empty: none has.
std::string RankProcesses::first_end() {
  const std::lock_guard lock(lock_);
  for (Process& process : processes_) {
    if (!has_ended(process)) continue;
    const int status = process.status;
    return fmt::format(
        "{}ended before it had come: {} {}", comm::failed_rank(process.rank, static_cast<size_t>(world_)),
        WIFEXITED(status) ? "exit code" : "signal", WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
  }
  return "";
}

std::vector<RankEnd> RankProcesses::ends() {
  const std::lock_guard lock(lock_);
  std::vector<RankEnd> ends = handed_over(words_.descriptor());
  for (Process& process : processes_) {
    const bool has_words =
        std::any_of(ends.begin(), ends.end(), [&](const RankEnd& end) { return end.rank == process.rank; });
    if (has_words || !has_ended(process) || !WIFEXITED(process.status)) continue;
    if (const int code = WEXITSTATUS(process.status); code != kExitOk) ends.push_back({process.rank, {code, ""}});
  }
  return ends;
}

bool RankProcesses::wait(double seconds) noexcept {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (true) {
    {
      const std::lock_guard lock(lock_);
      int num_left = 0;
      for (Process& process : processes_) num_left += has_ended(process) ? 0 : 1;
      if (num_left == 0) return true;
    }
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void RankProcesses::end(double seconds) noexcept {
  if (wait(seconds)) return;
  abandon();
  wait(kKilledSeconds);
}

void RankProcesses::abandon() noexcept {
  const std::lock_guard lock(lock_);
  for (Process& process : processes_) {
    if (!has_ended(process)) kill(process.id, SIGKILL);
  }
}

std::optional<Inheritance> inheritance(const std::string& file) {
  if (!file.starts_with(kDescriptors)) return std::nullopt;
  const std::optional<int> descriptor = number_of(std::string_view(file).substr(kDescriptors.size()));
  if (!descriptor) return std::nullopt;
  std::error_code is_missing;
  const std::filesystem::path behind = std::filesystem::read_symlink(file, is_missing);
  if (!behind.string().starts_with(fmt::format("/memfd:{}", kSecretName))) return std::nullopt;
  const std::string handed = read_file(file, kMaxSecretBytes);
  close(*descriptor);
  const size_t end = handed.rfind('\n');
  TESSERA_CHECK(end != std::string::npos, "the secret and the descriptor of last words");
  const std::optional<int> words = number_of(std::string_view(handed).substr(end + 1));
  TESSERA_CHECK(words.has_value(), "the descriptor of last words");
  fcntl(*words, F_SETFD, FD_CLOEXEC);
  return Inheritance{handed.substr(0, end), comm::Socket(*words)};
}

void outlive_rank_0() {
  prctl(PR_SET_PDEATHSIG, 0);
}

}  // namespace tessera::app
