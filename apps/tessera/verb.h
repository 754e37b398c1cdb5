// SPDX-License-Identifier: Apache-2.0
#pragma once
// A verb of the program: a CLI11 subcommand, and what it runs.
#include <memory>

namespace CLI {
class App;
}

namespace tessera::app {

// Exit codes, also in `tessera --help`.
enum ExitCode : int {
  kExitOk = 0,
  kExitFailure = 1,
  kExitUsage = 2,
  kExitBadModel = 3,
  kExitMemory = 4,
  kExitDevice = 5,
  kExitMismatch = 7,  // a check failed, or a part of the model was bypassed
  kExitCancelled = 130,
};

class Verb {
 public:
  virtual ~Verb() = default;
  // The subcommand that this verb registered; main asks whether it was given.
  virtual CLI::App* command() const = 0;
  virtual int run() = 0;
};

// Each adds its subcommand to `app`.
std::unique_ptr<Verb> add_generate(CLI::App& app);
std::unique_ptr<Verb> add_eval(CLI::App& app);
std::unique_ptr<Verb> add_perplexity(CLI::App& app);
std::unique_ptr<Verb> add_chat(CLI::App& app);
std::unique_ptr<Verb> add_serve(CLI::App& app);
std::unique_ptr<Verb> add_convert(CLI::App& app);
std::unique_ptr<Verb> add_bench(CLI::App& app);
std::unique_ptr<Verb> add_inspect(CLI::App& app);
std::unique_ptr<Verb> add_check(CLI::App& app);
std::unique_ptr<Verb> add_devices(CLI::App& app);
std::unique_ptr<Verb> add_verify(CLI::App& app);
std::unique_ptr<Verb> add_plan(CLI::App& app);
std::unique_ptr<Verb> add_completion(CLI::App& app);
std::unique_ptr<Verb> add_man(CLI::App& app);
std::unique_ptr<Verb> add_version(CLI::App& app);

}  // namespace tessera::app
