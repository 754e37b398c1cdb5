// SPDX-License-Identifier: Apache-2.0
#include "model_flags.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>

#include "backends/registry.h"
#include "base/env.h"
#include "base/error.h"
#include "base/file.h"
#include "base/strings.h"
#include "console.h"
#include "default_model.h"
#include "device/device_choice.h"
#include "progress_bar.h"
#include "usage.h"

namespace tessera::app {

void add_device_flag(CLI::App& command, std::string& device) {
  command.add_option("--device", device, "What computes: cpu, or a GPU as CUDA counts them")
      ->type_name("cpu|cuda:N")
      ->envname("TESSERA_DEVICE")
      ->capture_default_str()
      ->group("Model");
}

CLI::Option* add_dense_flag(CLI::App& command, std::string& dense, const std::string& otherwise) {
  return command
      .add_option("--dense", dense,
                  fmt::format("Maps of attention and of the shared expert are stored so [{}]", otherwise))
      ->type_name("fp8|nvfp4");
}

ops::WeightFormat dense_format(const std::string& dense, ops::WeightFormat otherwise) {
  if (dense.empty()) return otherwise;
  if (dense == "fp8") return ops::WeightFormat::kFp8Block;
  if (dense == "nvfp4") return ops::WeightFormat::kNvfp4;
  fail_usage(fmt::format("--dense: expected fp8 or nvfp4, found \"{}\"", printable(dense, 60)));
}

void add_model_flags(CLI::App& command, ModelFlags& flags) {
  command
      .add_option("--model", flags.model,
                  "Folder with config.json, tokenizer.json, *.safetensors [the bundled tiny-v4, or TESSERA_MODEL]")
      ->type_name("DIR")
      ->check(not_empty("a folder"))
      ->group("Model");
  command
      .add_option("--mode", flags.mode,
                  "Inputs of linear maps: f32 (nothing rounded), a16 (BF16), a8 (E4M3), a4 (NVFP4)")
      ->type_name("f32|a16|a8|a4")
      ->capture_default_str()
      ->group("Model");
  command.add_option("--cache", flags.cache, "Caches: fp8 (as the model was trained) or exact")
      ->type_name("fp8|exact")
      ->capture_default_str()
      ->group("Model");
  command
      .add_flag("--allow-inexact", flags.allows_inexact,
                "Round MXFP4 blocks that NVFP4 can't hold exactly, instead of refusing the model")
      ->group("Model");
  add_device_flag(command, flags.device);
  command.add_option("--threads", flags.threads, "Threads [one per processor]; results do not depend on it")
      ->group("Model");
}

model::LoadOptions load_options(const ModelFlags& flags) {
  if (flags.threads < 0 || flags.threads > 4096)
    fail_usage(fmt::format("--threads: expected 0 to 4096, found {}", flags.threads));
  const auto input = ops::input_mode_from_name(flags.mode);
  const auto cache = ops::cache_mode_from_name(flags.cache);
  if (!input) fail_usage(fmt::format("--mode: expected f32, a16, a8 or a4, found \"{}\"", printable(flags.mode, 40)));
  if (!cache) fail_usage(fmt::format("--cache: expected exact or fp8, found \"{}\"", printable(flags.cache, 40)));
  model::LoadOptions options;
  options.precision = {*input, *cache};
  options.num_threads = flags.threads;
  options.max_step_tokens = 0;
  options.allow_inexact = flags.allows_inexact;
  options.forced = ops::parse_forced(env_value("TESSERA_FORCE").value_or(""));
  options.bypass = model::parse_bypass(env_value("TESSERA_BYPASS").value_or(""));
  options.with_draft = false;  // one sequence without speculation has no use for it
  return options;
}

ModelFolder open_folder(const ModelFlags& flags, TokenizerNeed need) {
  ModelFolder folder;
  folder.directory = flags.model.empty() ? default_model() : flags.model;
  folder.tokenizer_path = (std::filesystem::path(folder.directory) / "tokenizer.json").string();
  folder.config = model::load_config(folder.directory);
  const bool has_tokenizer = file_exists(folder.tokenizer_path);
  if (need == TokenizerNeed::kRequired && !has_tokenizer) {
    fail(ErrorCode::kNotFound,
         fmt::format("{}: no such file; a model is a folder with config.json, tokenizer.json and *.safetensors",
                     printable(folder.tokenizer_path)));
  }
  if (has_tokenizer) folder.tokenizer.emplace(text::Tokenizer::load(folder.tokenizer_path));
  if (has_tokenizer && folder.tokenizer->vocab_size() > folder.config.vocab_size) {
    fail_data(folder.tokenizer_path, "token ids",
              fmt::format("at most {}, vocab_size of config.json", folder.config.vocab_size),
              fmt::format("{}", folder.tokenizer->vocab_size()));
  }
  return folder;
}

void choose_step_tokens(const ModelFolder& folder, const ModelFlags& flags, int64_t world,
                        model::LoadOptions& options) {
  if (options.max_step_tokens > 0) return;
  options.max_step_tokens =
      model::default_step_tokens(folder.directory, folder.config, options, device::machine_of(flags.device), world);
}

model::LoadedModel load_weights(const ModelFolder& folder, const ModelFlags& flags, model::LoadOptions options,
                                bool is_quiet) {
  choose_step_tokens(folder, flags, options.shard.world, options);
  if (options.bypass.any()) {
    print_warning(
        "**** TESSERA_BYPASS leaves parts of the model out: this output is not the model's. Exit code 7. ****");
  }
  ConsoleLog log(is_quiet);
  ProgressBar progress(is_quiet);
  return model::load_model(folder.directory, options, backends::all_backends(), device::machine_of(flags.device), &log,
                           &progress);
}

void warn_of_backends(const device::Machine& machine) {
  ConsoleLog log(true);
  for (const std::string& line : ops::unusable_names(backends::all_backends(), machine)) {
    log.write(LogLevel::kWarning, line);
  }
}

}  // namespace tessera::app
