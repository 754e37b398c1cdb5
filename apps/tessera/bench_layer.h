// SPDX-License-Identifier: Apache-2.0
#pragma once
// tessera bench layer
#include <string>

#include "bench/e2e/bench_layer.h"

namespace CLI {
class App;
}

namespace tessera::app {

class BenchLayer {
 public:
  // Adds the subcommand; must outlive it.
  explicit BenchLayer(CLI::App& bench);
  CLI::App* command() const { return command_; }
  // `load`: mode, threads and forced variants, which the subcommands share. Throws kInvalidArgument, naming the flag.
  void run(const model::LoadOptions& load, bool is_json);

 private:
  CLI::App* command_;
  bench::LayerOptions options_;
  std::string dense_;
};

}  // namespace tessera::app
