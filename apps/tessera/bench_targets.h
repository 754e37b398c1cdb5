// SPDX-License-Identifier: Apache-2.0
#pragma once
// tessera bench targets
#include <string>

#include "bench/targets/targets.h"

namespace CLI {
class App;
}

namespace tessera::app {

class BenchTargets {
 public:
  // Adds the subcommand; must outlive it.
  explicit BenchTargets(CLI::App& bench);
  CLI::App* command() const { return command_; }
  // `forced` variants are the caller's.
  void run(const std::vector<std::pair<std::string, std::string>>& forced);

 private:
  CLI::App* command_;
  bench::TargetOptions options_;
  std::string record_;
};

}  // namespace tessera::app
