// SPDX-License-Identifier: Apache-2.0
#include "plan_machine.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <optional>

#include "base/atomic_file.h"
#include "base/strings.h"
#include "bench/shapes/published.h"
#include "console.h"
#include "model_flags.h"
#include "usage.h"
#include "verb.h"

namespace tessera::app {

namespace {

using ops::WeightFormat;

constexpr int64_t kUsualContext = 8192;

bool has_weights(const std::string& directory) {
  const std::filesystem::directory_iterator files(directory);
  return std::any_of(begin(files), end(files),
                     [](const auto& file) { return file.path().extension() == ".safetensors"; });
}

}  // namespace

PlanMachine::PlanMachine(CLI::App& command) : command_(command) {
  CLI::App& c = command;
  const CLI::Validator size = CLI::AsSizeValue(false).description("");  // 8k, 1m: powers of 1024
  c.add_option("--gpus", gpus_, "The machine: 1 to 8 GPUs of a kind, as in 8xh200")
      ->type_name("Nxh100|h200|b200|b300|rtx6000|gb10");
  c.add_option("--model", model_, "flash, pro, or a model's folder [flash]")->type_name("flash|pro|DIR");
  c.add_option("--context", context_, "Tokens of each sequence, as in 128k [8k]")->transform(size)->type_name("N");
  c.add_option("--batch", load_.sequences, "Sequences at once [1]")->transform(size)->type_name("N");
  add_dense_flag(c, dense_, "fp8; a folder's weights as they are");
  c.add_option("--step-tokens", load_.step_tokens, "Most tokens of a step [4k]")->transform(size)->type_name("N");
  c.add_option("--json", json_file_, "Every figure of every plan, into this file")->type_name("FILE");
}

bool PlanMachine::is_asked() const {
  const auto options = command_.get_options();
  return std::any_of(options.begin(), options.end(), [](const CLI::Option* option) { return option->count() > 0; });
}

model::StoredModel PlanMachine::stored_model() const {
  const WeightFormat dense = dense_format(dense_, WeightFormat::kFp8Block);
  const bool is_published = model_ == "flash" || model_ == "pro";
  const model::Config config = is_published ? bench::published_config(model_) : model::load_config(model_);
  model::StoredModel stored = model::published_model(config, dense);
  if (is_published || !has_weights(model_)) return stored;
  model::StoredModel found = model::checkpoint_model(model_, config);
  if (dense_.empty()) return found;
  for (size_t i = 0; i < stored.rows.size(); ++i) {
    const bool is_dense = stored.rows[i].expert < 0 && stored.formats[i] == dense;
    if (is_dense) found.formats[i] = dense;
  }
  return found;
}

int PlanMachine::run() const {
  if (gpus_.empty()) fail_usage("--gpus: expected a machine, as in 8xh200, found none");
  const bench::Gpus gpus = bench::parse_gpus(gpus_);
  std::optional<AtomicFile> file;
  if (!json_file_.empty()) file.emplace(json_file_);
  const model::StoredModel model = stored_model();
  bench::ServingLoad load = load_;
  load.context = command_.count("--context") > 0 ? context_ : std::min(kUsualContext, model.config.max_positions);
  const bench::MachinePlan plan = bench::plan_machine(model, gpus, load);
  const std::string name = printable(model_, 120);
  if (file) {
    const std::string json = bench::machine_plan_json(plan, name);
    file->write(json.data(), json.size());
    file->commit();
  }
  print_result(bench::machine_plan_text(plan, name));
  return kExitOk;
}

}  // namespace tessera::app
