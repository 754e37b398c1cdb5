// SPDX-License-Identifier: Apache-2.0
#pragma once
// tessera plan --gpus: a model on a machine of several GPUs.
#include <optional>
#include <string>

#include "base/atomic_file.h"
#include "bench/plan/machine_plan.h"

namespace CLI {
class App;
}

namespace tessera::app {

// "8192", "8k", "1M": a whole number, or one of 1,024s, 1,024^2s or 1,024^3s. Makes the number of it; returns what is
// wrong.
std::string read_size(std::string& text);

// The file of --json, tried before anything is computed; "-" is stdout, which then has it alone.
class PlanOutput {
 public:
  explicit PlanOutput(const std::string& json_file);
  // `text` goes to stdout, or in its place `json`.
  void write(const std::string& text, const std::string& json);
  // Adds the flag to a verb.
  static void add_flag(CLI::App& command, std::string& json_file, const char* what);

 private:
  std::string name_;
  std::optional<AtomicFile> file_;
};

class PlanMachine {
 public:
  // Adds its flags to the verb, which has sub-verbs too.
  explicit PlanMachine(CLI::App& command);
  // Whether any of them was given.
  bool is_asked() const;
  // Throws for the first that was given: `verb`, a sub-verb, has none of them.
  void refuse_beside(const char* verb) const;
  // Prints the report; exit code 4 where no written plan fits.
  int run() const;

 private:
  model::StoredModel stored_model() const;

  const CLI::App& command_;
  std::string model_ = "flash", mode_ = "a16", gpus_, dense_, json_file_;
  bench::ServingLoad load_;
  int64_t context_ = 0;  // 0: not given
};

}  // namespace tessera::app
