// SPDX-License-Identifier: Apache-2.0
#pragma once
// tessera bench serve
#include <optional>
#include <string>
#include <vector>

#include "base/atomic_file.h"
#include "bench/serve/load_report.h"

namespace CLI {
class App;
}

namespace tessera::app {

class BenchServe {
 public:
  // Adds the subcommand; must outlive it.
  explicit BenchServe(CLI::App& bench);
  CLI::App* command() const { return command_; }
  // The exit code. Throws kInvalidArgument, naming the flag.
  int run();

 private:
  void check() const;
  std::vector<bench::LoadPoint> points() const;
  std::string model_of(const bench::Address& address, const std::string& key) const;
  std::string served_device() const;
  void print_json(const std::vector<bench::LoadSummary>& summaries, const std::string& url,
                  const std::string& model) const;
  std::string description(const std::string& model) const;

  CLI::App* command_;
  std::string url_, model_directory_, prompt_tokens_ = "128", output_tokens_ = "64", plot_;
  std::vector<std::string> serve_flags_;
  std::vector<double> rates_;
  std::vector<int64_t> concurrency_;
  bench::LoadLimits limits_;
  bench::WorkloadOptions workload_;
  bool is_json_ = false, is_quiet_ = false;
};

}  // namespace tessera::app
