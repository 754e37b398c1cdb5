// SPDX-License-Identifier: Apache-2.0
#include "rank_processes.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
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

[[noreturn]] void fail_start(const char* what) {
  fail(ErrorCode::kResourceExhausted,
       fmt::format("can't start a further rank: {}: {}", what, std::generic_category().message(errno)));
}

}  // namespace

void RankProcesses::start(const std::string& verb, int world, int port, const std::string& secret) {
  world_ = world;
  // Ignored, as some supervisors leave it, nobody would hear how a rank ended.
  std::signal(SIGCHLD, SIG_DFL);
  // In memory, where nobody else's command line or environment shows it.
  const comm::Socket secret_file(memfd_create(kSecretName, 0));
  if (!secret_file.is_open() || write(secret_file.descriptor(), secret.data(), secret.size()) < 0) fail_start("memfd");
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
  const std::lock_guard lock(lock_);
  for (Process& process : processes_) {
    if (!has_ended(process)) continue;
    const int status = process.status;
    return fmt::format("rank {} of {} ended before it had come: {} {}", process.rank, world_,
                       WIFEXITED(status) ? "exit code" : "signal",
                       WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
  }
  return "";
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

std::optional<std::string> inherited_secret(const std::string& file) {
  if (!file.starts_with(kDescriptors)) return std::nullopt;
  int descriptor = -1;
  const char* const end = file.data() + file.size();
  const auto [rest, error] = std::from_chars(file.data() + kDescriptors.size(), end, descriptor);
  if (error != std::errc() || rest != end) return std::nullopt;
  std::error_code is_missing;
  const std::filesystem::path behind = std::filesystem::read_symlink(file, is_missing);
  if (!behind.string().starts_with(fmt::format("/memfd:{}", kSecretName))) return std::nullopt;
  std::string secret = read_file(file, kMaxSecretBytes);
  close(descriptor);
  return secret;
}

void outlive_rank_0() {
  prctl(PR_SET_PDEATHSIG, 0);
}

}  // namespace tessera::app
