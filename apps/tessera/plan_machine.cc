// SPDX-License-Identifier: Apache-2.0
#include "plan_machine.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <charconv>
#include <filesystem>

#include "base/error.h"
#include "base/strings.h"
#include "bench/shapes/published.h"
#include "console.h"
#include "model_flags.h"
#include "rank_split.h"
#include "usage.h"
#include "verb.h"

namespace tessera::app {

namespace {

using ops::WeightFormat;

// Into how many GPUs a model can be cut: "1, 2, 4 or 8".
std::string counts_of(const model::Config& config) {
  std::vector<std::string> counts;
  for (int64_t world = 1; world <= bench::kMostGpus; ++world) {
    try {
      model::parallel_plans(config, world);
      counts.push_back(std::to_string(world));
    } catch (const Error&) {
      // Not into so many.
    }
  }
  const std::string last = counts.back();
  counts.pop_back();
  return counts.empty() ? last : fmt::format("{} or {}", fmt::join(counts, ", "), last);
}

void check_count(const model::Config& config, int64_t count) {
  try {
    model::parallel_plans(config, count);
  } catch (const Error& error) {
    fail_usage(fmt::format("--gpus: expected {} of them for this model, found {}: {}", counts_of(config), count,
                           error.what()));
  }
}

bool has_weights(const std::string& directory) {
  const std::filesystem::directory_iterator files(directory);
  return std::any_of(begin(files), end(files),
                     [](const auto& file) { return file.path().extension() == ".safetensors"; });
}

// A published size's name in whichever case, where no folder is called so.
std::string published_name(const std::string& name) {
  const std::string lower = CLI::detail::to_lower(name);
  return (lower == "flash" || lower == "pro") && !std::filesystem::exists(name) ? lower : name;
}

}  // namespace

std::string read_size(std::string& text) {
  constexpr std::string_view kUnits = "kmg";
  std::string_view digits = text;
  int shift = 0;
  if (!digits.empty()) {
    const size_t unit = kUnits.find(static_cast<char>(std::tolower(static_cast<unsigned char>(digits.back()))));
    if (unit != std::string_view::npos) shift = 10 * static_cast<int>(unit + 1), digits.remove_suffix(1);
  }
  int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size() || value < 0 || value > (INT64_MAX >> shift)) {
    return fmt::format("expected a whole number such as 8192 or 8k, found \"{}\"", printable(text, 40));
  }
  text = std::to_string(value << shift);
  return "";
}

PlanOutput::PlanOutput(const std::string& json_file) : name_(json_file) {
  if (!name_.empty() && name_ != "-") file_.emplace(name_);
}

void PlanOutput::write(const std::string& text, const std::string& json) {
  if (file_) {
    file_->write(json.data(), json.size());
    file_->commit();
  }
  print_result(name_ == "-" ? json : text);
}

void PlanOutput::add_flag(CLI::App& command, std::string& json_file, const char* what) {
  command
      .add_option("--json", json_file, fmt::format("{}, into this file; -: to stdout, in place of the report", what))
      ->type_name("FILE")
      ->check(not_empty("a file"));
}

PlanMachine::PlanMachine(CLI::App& command) : command_(command) {
  CLI::App& c = command;
  const CLI::Validator size(read_size, "");
  c.add_option("--gpus", gpus_, "The machine: 1 to 8 GPUs of a kind, as in 8xh200")
      ->type_name("Nxh100|h200|b200|b300|rtx6000|gb10");
  c.add_option("--model", model_, "flash, pro, or a model's folder [flash]")
      ->type_name("flash|pro|DIR")
      ->check(not_empty("flash, pro or a folder"))
      ->transform(published_name);
  c.add_option("--context", context_, "Tokens of each sequence, as in 128k [8k]")->transform(size)->type_name("N");
  c.add_option("--batch", load_.sequences, "Sequences at once [1]")->transform(size)->type_name("N");
  add_dense_flag(c, dense_, "fp8; a folder's weights as they are");
  c.add_option("--mode", mode_, "Inputs of linear maps: a16 (BF16), a4 (NVFP4; on Hopper times are those of a16)")
      ->type_name("a16|a4")
      ->capture_default_str();
  c.add_option("--step-tokens", load_.step_tokens, "Most tokens of a step [4k]")->transform(size)->type_name("N");
  PlanOutput::add_flag(c, json_file_, "Every figure of every plan");
}

bool PlanMachine::is_asked() const {
  const auto options = command_.get_options();
  return std::any_of(options.begin(), options.end(), [](const CLI::Option* option) { return option->count() > 0; });
}

void PlanMachine::refuse_beside(const char* verb) const {
  for (const CLI::Option* option : command_.get_options()) {
    if (option->count() == 0) continue;
    fail_usage(
        fmt::format("{} belongs to tessera plan by itself: expected it nowhere beside {}", option->get_name(), verb));
  }
}

model::StoredModel PlanMachine::stored_model() const {
  const WeightFormat dense = dense_format(dense_, WeightFormat::kFp8Block);
  const bool is_published = model_ == "flash" || model_ == "pro";
  const model::Config config = is_published ? bench::published_config(model_) : model::load_config(model_);
  if (is_published || !has_weights(model_)) return model::published_model(config, dense);
  model::StoredModel found = model::checkpoint_model(model_, config);
  return dense_.empty() ? found : model::with_dense(std::move(found), dense);
}

int PlanMachine::run() const {
  if (gpus_.empty()) fail_usage("--gpus: expected a machine, as in 8xh200, found none");
  const bench::Gpus gpus = bench::parse_gpus(gpus_);
  PlanOutput output(json_file_);
  const model::StoredModel model = stored_model();
  check_count(model.config, gpus.count);
  bench::ServingLoad load = load_;
  const auto input = ops::input_mode_from_name(mode_);
  if (input != ops::InputMode::kA16 && input != ops::InputMode::kA4) {
    fail_usage(fmt::format("--mode: expected a16 or a4, found \"{}\"", printable(mode_, 40)));
  }
  load.precision.input = *input;
  load.context = command_.count("--context") > 0 ? context_ : std::min(kUsualContext, model.config.max_positions);
  const bench::MachinePlan plan = bench::plan_machine(model, gpus, load);
  const std::string name = printable(model_, 120);
  output.write(bench::machine_plan_text(plan, name), bench::machine_plan_json(plan, name));
  const bench::Candidate& best = plan.best();
  if (best.fits) return kExitOk;
  print_error(fmt::format("does not fit: {} needs {:.2f} GB of each GPU, {} has {:.2f}; {}", name,
                          static_cast<double>(best.needed_bytes) / 1e9, gpus.target->gpu,
                          static_cast<double>(plan.capacity_bytes()) / 1e9, plan.advice.front()));
  return kExitMemory;
}

}  // namespace tessera::app
