// SPDX-License-Identifier: Apache-2.0
// tessera: one program, one file per verb.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <new>
#include <vector>

#include "base/env.h"
#include "base/error.h"
#include "console.h"
#include "verb.h"

namespace tessera::app {

namespace {

int exit_code_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return kExitUsage;
    case ErrorCode::kNotFound:
    case ErrorCode::kDataLoss:
    case ErrorCode::kUnsupported:
      return kExitBadModel;
    case ErrorCode::kResourceExhausted:
      return kExitMemory;
    case ErrorCode::kDeviceError:
      return kExitDevice;
    case ErrorCode::kCancelled:
      return kExitCancelled;
    case ErrorCode::kInternal:
      return kExitFailure;
  }
  return kExitFailure;
}

constexpr const char* kFooter = R"(
Exit codes: 0 ok, 1 failure, 2 usage, 3 bad model or file, 4 not enough memory, 5 device or driver,
            7 a check failed or a part of the model was bypassed, 130 stopped by Ctrl-C.

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

int run(int argc, char** argv) {
  CLI::App app{"Tessera: DeepSeek-V4 in NVFP4, on any machine.", "tessera"};
  app.require_subcommand(0, 1);
  app.footer(kFooter);
  app.set_help_all_flag("--help-all", "Help of every verb, and the environment variables");
  std::vector<std::unique_ptr<Verb>> verbs;
  verbs.push_back(add_generate(app));
  verbs.push_back(add_chat(app));
  verbs.push_back(add_eval(app));
  verbs.push_back(add_perplexity(app));
  verbs.push_back(add_convert(app));
  verbs.push_back(add_devices(app));
  verbs.push_back(add_bench(app));
  verbs.push_back(add_completion(app));
  verbs.push_back(add_man(app));
  verbs.push_back(add_version(app));
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForAllHelp& request) {
    app.exit(request);
    print_result(environment_help());
    return kExitOk;
  } catch (const CLI::Success& request) {
    return app.exit(request);
  } catch (const CLI::ParseError& error) {
    print_error(fmt::format("{} (try tessera --help)", error.what()));
    return kExitUsage;
  }
  for (const auto& verb : verbs) {
    if (verb->command()->parsed()) return verb->run();
  }
  print_result(app.help());
  return kExitUsage;
}

}  // namespace

}  // namespace tessera::app

int main(int argc, char** argv) {
  using namespace tessera;
  try {
    return app::run(argc, argv);
  } catch (const Error& error) {
    app::print_error(error.what());
    return app::exit_code_of(error.code());
  } catch (const std::bad_alloc&) {
    app::print_error("out of memory: an allocation failed; close other programs or use a smaller model");
    return app::kExitMemory;
  } catch (const std::exception& error) {
    app::print_error(error.what());
    return app::kExitFailure;
  }
}
