// SPDX-License-Identifier: Apache-2.0
#pragma once
// The flags that say which model runs and how, and what every verb that runs one does with them.
#include <optional>
#include <string>

#include "model/load_model.h"
#include "text/tokenizer/tokenizer.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace tessera::app {

struct ModelFlags {
  std::string model;  // empty: the bundled one
  std::string mode = "a16", cache = "fp8";
  bool allows_inexact = false;
  int threads = 0;  // 0: one per processor
  std::string device = "cpu";
};

// Adds --model, --mode, --cache, --allow-inexact, --device and --threads. `flags` must outlive `command`.
void add_model_flags(CLI::App& command, ModelFlags& flags);

// The flags and the environment's switches for diagnosis as load options. Throws kInvalidArgument, naming the flag.
// max_step_tokens is 0: choose_step_tokens() sets it, for who has not said another number.
model::LoadOptions load_options(const ModelFlags& flags);

// A model's folder, before its weights are read.
struct ModelFolder {
  std::string directory, tokenizer_path;
  model::Config config;
  std::optional<text::Tokenizer> tokenizer;
};

enum class TokenizerNeed { kRequired, kIfPresent };

// Reads config.json, then tokenizer.json: a wrong folder is reported as such, not as a missing tokenizer.
ModelFolder open_folder(const ModelFlags& flags, TokenizerNeed need);

// Loads the weights with progress and messages on stderr, and says so where parts of the model are bypassed.
model::LoadedModel load_weights(const ModelFolder& folder, const ModelFlags& flags, model::LoadOptions options,
                                bool is_quiet);

// Where it is 0, max_step_tokens becomes what is best for a model whose weights `world` ranks share.
void choose_step_tokens(const ModelFolder& folder, const ModelFlags& flags, int64_t world, model::LoadOptions& options);

// Warns of backends that TESSERA_BACKENDS names in vain; load_weights does so too. Throws as ops::unusable_names.
void warn_of_backends(const device::Machine& machine);

// Adds --device to a command.
void add_device_flag(CLI::App& command, std::string& device);

// Adds --dense, the format of attention's maps and of the shared expert: fp8 or nvfp4; `otherwise` says what holds
// without it. dense_format throws kInvalidArgument, naming the flag, for another word.
CLI::Option* add_dense_flag(CLI::App& command, std::string& dense, const std::string& otherwise);
ops::WeightFormat dense_format(const std::string& dense, ops::WeightFormat otherwise);

}  // namespace tessera::app
