// SPDX-License-Identifier: Apache-2.0
// tessera: one program, one file per verb.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <optional>
#include <sstream>
#include <vector>

#include "base/env.h"
#include "base/error.h"
#include "console.h"
#include "fault.h"
#include "parse_fault.h"
#include "verb.h"

namespace tessera::app {

namespace {

constexpr const char* kFooter = R"(
Exit codes: 0 ok, 1 failure, 2 usage, 3 bad model or file, 4 not enough memory or disk, 5 device, driver or a lost
            rank, 7 a check failed or a part of the model was bypassed, 130 stopped by Ctrl-C.

Examples:
  tessera generate "Compute 257-7."
  tessera generate --model /models/DeepSeek-V4-Flash-NVFP4 "What is a tessera?"

Each verb has its own --help.)";

std::string environment_help() {
  std::string text = "\nEnvironment:\n";
  for (const EnvVariable& variable : env_variables())
    text += fmt::format("  {:<22} {}\n", variable.name, variable.meaning);
  return text;
}

// A result that did not reach stdout is a failure, whatever the verb thought.
int with_written_results(int code) {
  const std::optional<std::string> fault = result_fault();
  if (!fault) return code;
  print_error(fmt::format("stdout: cannot write all of the result: {}", *fault));
  return code == kExitOk ? kExitFailure : code;
}

// Help or the version.
void print_what_was_asked(const CLI::App& app, const CLI::Success& request) {
  std::ostringstream text;
  app.exit(request, text, text);
  print_result(text.str());
}

// The reference kernels keep rows on the stack.
void check_stack() {
  constexpr rlim_t kNeeded = 2 << 20;
  rlimit limit{};
  if (getrlimit(RLIMIT_STACK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= kNeeded) return;
  fail(ErrorCode::kResourceExhausted,
       fmt::format("stack limit: expected at least {} KiB, found {}; run: ulimit -s 8192", kNeeded >> 10,
                   limit.rlim_cur >> 10));
}

// A file that is opened takes the lowest number that is free: without this one of ours would be taken for stdout or
// stderr where those are closed, and results would land in it. Reading and writing them fails as before.
void hold_standard_files() {
  for (const int file : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(file, F_GETFD) < 0) open("/dev/null", file == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

int run(int argc, char** argv) {
  // Writing past a file size limit is then an error with a message; by default it ends the program.
  std::signal(SIGXFSZ, SIG_IGN);
  hold_standard_files();
  check_stack();
  CLI::App app{"Tessera: DeepSeek-V4 in NVFP4, on any machine.", "tessera"};
  app.require_subcommand(0, 1);
  app.footer(kFooter);
  app.set_version_flag("--version", std::string("tessera ") + TESSERA_VERSION);
  app.set_help_all_flag("--help-all", "Help of every verb, and the environment variables");
  std::vector<std::unique_ptr<Verb>> verbs;
  verbs.push_back(add_generate(app));
  verbs.push_back(add_chat(app));
  verbs.push_back(add_eval(app));
  verbs.push_back(add_serve(app));
  verbs.push_back(add_perplexity(app));
  verbs.push_back(add_convert(app));
  verbs.push_back(add_inspect(app));
  verbs.push_back(add_check(app));
  verbs.push_back(add_devices(app));
  verbs.push_back(add_verify(app));
  verbs.push_back(add_bench(app));
  verbs.push_back(add_plan(app));
  verbs.push_back(add_completion(app));
  verbs.push_back(add_man(app));
  verbs.push_back(add_version(app));
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForAllHelp& request) {
    print_what_was_asked(app, request);
    print_result(environment_help());
    return with_written_results(kExitOk);
  } catch (const CLI::Success& request) {
    print_what_was_asked(app, request);
    return with_written_results(kExitOk);
  } catch (const CLI::ParseError& error) {
    print_error(parse_fault(app, error));
    return kExitUsage;
  }
  for (const auto& verb : verbs) {
    if (verb->command()->parsed()) return with_written_results(verb->run());
  }
  print_result(app.help());
  return with_written_results(kExitUsage);
}

}  // namespace

}  // namespace tessera::app

int main(int argc, char** argv) {
  using namespace tessera;
  try {
    return app::run(argc, argv);
  } catch (const std::exception&) {
    const app::Fault fault = app::current_fault();
    app::print_error(fault.message);
    return fault.code;
  }
}
