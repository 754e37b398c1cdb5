// SPDX-License-Identifier: Apache-2.0
// tessera inspect
#include "doctor/inspect.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/strings.h"
#include "console.h"
#include "default_model.h"
#include "verb.h"

namespace tessera::app {

namespace {

using doctor::Inspection;

std::string as_text(const Inspection& found) {
  const model::Config& c = found.config;
  std::string text = fmt::format("{}\n{}\n\n", found.directory, found.what);
  text +=
      fmt::format("files      {}, {} tensors, {}\n", found.num_files, found.num_tensors, format_bytes(found.num_bytes));
  text += fmt::format("experts    {} of {} for each token, inner width {}, {} layers routed by token id\n",
                      c.experts_per_token, c.num_experts, c.expert_inner, c.num_hash_layers);
  int64_t csa = 0, hca = 0;
  for (const int64_t ratio : c.compress_ratios) csa += ratio == 4, hca += ratio == 128;
  text += fmt::format("attention  {} heads of {}, window {}; layers: {} window only, {} of ratio 4, {} of ratio 128\n",
                      c.num_heads, c.head_dim, c.sliding_window, c.num_layers - csa - hca, csa, hca);
  text += fmt::format("context    {} tokens; vocabulary {}; draft: {}\n\n", c.max_positions, c.vocab_size, found.draft);
  text += fmt::format("{:<20} {:<18} {:>9} {:>10} {:>12}\n", "part", "format", "tensors", "values", "bytes");
  for (const doctor::FamilyFormat& part : found.families) {
    text += fmt::format("{:<20} {:<18} {:>9} {:>9.3g}G {:>12}\n", part.family, part.format, part.num_matrices,
                        static_cast<double>(part.num_values) / 1e9, format_bytes(part.num_bytes));
  }
  text += fmt::format("\nin memory  {} of weights; a sequence takes {} and {:.0f} B for each token\n",
                      format_bytes(found.loaded_bytes), format_bytes(static_cast<uint64_t>(found.fixed_bytes)),
                      found.bytes_per_token);
  text += "\nmemory       longest context (one sequence, by size alone)\n";
  for (const doctor::ContextRow& row : found.contexts) {
    text += fmt::format("{:<12} {}\n", format_bytes(row.memory_bytes),
                        row.max_tokens == 0 ? "the weights do not fit" : fmt::format("{} tokens", row.max_tokens));
  }
  text += "\nGPU            fewest that hold it (by size alone), longest context on them\n";
  for (const doctor::GpuRow& row : found.gpus) {
    text +=
        fmt::format("{:<14} {}\n", row.name,
                    row.num_gpus == 0 ? "more than 64" : fmt::format("{}, {} tokens", row.num_gpus, row.max_tokens));
  }
  for (const std::string& problem : found.problems) text += "problem    " + problem + "\n";
  return text;
}

nlohmann::ordered_json as_json(const Inspection& found) {
  using nlohmann::ordered_json;
  ordered_json out = {{"directory", printable(found.directory)},
                      {"what", found.what},
                      {"layers", found.config.num_layers},
                      {"max_positions", found.config.max_positions},
                      {"files", found.num_files},
                      {"tensors", found.num_tensors},
                      {"bytes", found.num_bytes},
                      {"loaded_bytes", found.loaded_bytes},
                      {"draft", found.draft},
                      {"kv_bytes_per_token", found.bytes_per_token},
                      {"kv_fixed_bytes", found.fixed_bytes},
                      {"parts", ordered_json::array()},
                      {"contexts", ordered_json::array()},
                      {"gpus", ordered_json::array()},
                      {"problems", found.problems}};
  for (const doctor::FamilyFormat& part : found.families) {
    out["parts"].push_back({{"part", part.family},
                            {"format", part.format},
                            {"tensors", part.num_matrices},
                            {"values", part.num_values},
                            {"bytes", part.num_bytes}});
  }
  for (const doctor::ContextRow& row : found.contexts) {
    out["contexts"].push_back({{"memory_bytes", row.memory_bytes}, {"max_tokens", row.max_tokens}});
  }
  for (const doctor::GpuRow& row : found.gpus) {
    out["gpus"].push_back({{"name", row.name}, {"gpus", row.num_gpus}, {"max_tokens", row.max_tokens}});
  }
  return out;
}

class Inspect final : public Verb {
 public:
  explicit Inspect(CLI::App& app)
      : command_(app.add_subcommand("inspect", "Show what a checkpoint is and where it fits, from its headers alone")) {
    command_->add_option("DIR", directory_, "Folder with config.json and *.safetensors [the bundled tiny-v4]");
    command_->add_option("--cache", cache_, "Caches to count: fp8 or exact")
        ->check(CLI::IsMember({"fp8", "exact"}))
        ->capture_default_str();
    command_->add_flag("--json", is_json_, "One JSON object");
    command_->footer(
        "\nExits with 3 where a tensor of the model is missing or can't be read; tessera check says more.\n"
        "\nExamples:\n  tessera inspect DIR\n  tessera inspect DIR --cache exact --json");
  }
  CLI::App* command() const override { return command_; }

  int run() override {
    const ops::Precision precision{ops::InputMode::kA16, *ops::cache_mode_from_name(cache_)};
    const Inspection found = doctor::inspect(directory_.empty() ? default_model() : directory_, precision);
    print_result(is_json_ ? as_json(found).dump() + "\n" : as_text(found));
    if (found.problems.empty()) return kExitOk;
    print_error(fmt::format("{}; tessera check says more", printable(found.problems.front(), 1000)));
    return kExitBadModel;
  }

 private:
  CLI::App* command_;
  std::string directory_, cache_ = "fp8";
  bool is_json_ = false;
};

}  // namespace

std::unique_ptr<Verb> add_inspect(CLI::App& app) {
  return std::make_unique<Inspect>(app);
}

}  // namespace tessera::app
