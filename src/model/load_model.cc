// SPDX-License-Identifier: Apache-2.0
#include "model/load_model.h"

#include <fmt/format.h>

#include <charconv>
#include <chrono>

#include "base/error.h"
#include "base/strings.h"
#include "checkpoint/checkpoint.h"
#include "model/layers/moe_layer.h"
#include "model/memory_fit.h"
#include "model/model.h"
#include "model/weight_source.h"

namespace tessera::model {

namespace {

// The layer of "layers.N...." or "model.layers.N...."; -1 for other names.
int64_t layer_of(std::string_view name) {
  if (name.starts_with("model.")) name.remove_prefix(6);
  if (!name.starts_with("layers.")) return -1;
  name.remove_prefix(7);
  int64_t layer = -1;
  const auto [stop, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
  return error == std::errc() && stop != name.data() + name.size() && *stop == '.' ? layer : -1;
}

// Layers, compressors and indexers in the checkpoint that config.json does not have: a model of fewer parts would run
// and talk nonsense.
void check_config_covers(const WeightSource& weights, const Config& config, const std::string& directory) {
  const std::string file = directory + "/config.json";
  for (const std::string& name : weights.unknown()) {
    const int64_t layer = layer_of(name);
    if (layer >= config.num_layers) {
      fail_data(file, "field num_hidden_layers",
                fmt::format("more than {}, since the checkpoint has tensor {}", layer, printable(name, 120)),
                fmt::format("{}", config.num_layers));
    }
    const bool is_part = name.find(".compressor.") != std::string::npos || name.find(".indexer.") != std::string::npos;
    if (layer >= 0 && is_part) {
      fail_data(file, fmt::format("field compress_ratios[{}]", layer),
                fmt::format("one that uses tensor {} of the checkpoint", printable(name, 120)),
                fmt::format("{}", config.compress_ratios[static_cast<size_t>(layer)]));
    }
  }
}

void log_unused(const WeightSource& weights, LogSink& log) {
  if (!weights.kept_aside().empty()) {
    log.write(LogLevel::kDebug, fmt::format("{} tensors of draft blocks are kept aside, the first is {}",
                                            weights.kept_aside().size(), printable(weights.kept_aside().front())));
  }
  if (!weights.unknown().empty()) {
    log.write(LogLevel::kWarning, fmt::format("{} tensors of the checkpoint are unknown and not used, the first is {}",
                                              weights.unknown().size(), printable(weights.unknown().front())));
  }
}

// Of the routed experts, which are nearly all of the weights.
uint64_t padding_of(const Config& config, const WeightSource& weights, int64_t num_drafts, const LoadOptions& options,
                    std::span<const ops::Backend* const> backends, const device::Machine& machine) {
  ops::Planner planner(backends, machine, options.forced);  // its lines are not those of the model
  uint64_t padding = 0;
  for (int64_t layer = 0; layer < config.num_layers + num_drafts; ++layer) {
    const std::string prefix = layer < config.num_layers ? fmt::format("layers.{}.", layer)
                                                         : fmt::format("mtp.{}.", layer - config.num_layers);
    padding += expert_padding(planner, config, weights, options.precision, prefix + "ffn.");
  }
  return padding;
}

constexpr int64_t kMostStepTokens = 8192, kMixedStepTokens = 512;

}  // namespace

int64_t default_running(std::string_view device) {
  return device == "cpu" ? 16 : 256;
}

int64_t default_step_tokens(const std::string& directory, const Config& config, const LoadOptions& options,
                            const device::Machine& machine, int64_t world) {
  if (!machine.gpu) return LoadOptions{}.max_step_tokens;
  // Ranks have to choose alike, whatever else is on their GPUs; a prompt is known to one of them.
  const uint64_t memory = world == 1 ? machine.free_bytes() : machine.gpu->memory_bytes;
  const uint64_t weights = file_bytes(directory) / static_cast<uint64_t>(world);
  const uint64_t left = memory - std::min(memory, weights);
  const uint64_t others = world > 1 ? 0
                                    : static_cast<uint64_t>(options.extra_bytes) +
                                          sequence_bytes(config, options.precision, options.sequence_tokens,
                                                         ring_slots(config, kMostStepTokens));
  const auto fits = [&](int64_t tokens) {
    const uint64_t step = Model::step_bytes(config, options.precision, tokens, world);
    return step <= left / 8 && step + others <= left;
  };
  int64_t tokens = kMostStepTokens;
  while (tokens > kMixedStepTokens && !fits(tokens)) tokens /= 2;
  return tokens;
}

int64_t default_mixed_step_tokens(const device::Machine& machine, int64_t max_step_tokens, int64_t max_running) {
  return machine.gpu ? std::min(max_step_tokens, std::max(kMixedStepTokens, 2 * max_running)) : max_step_tokens;
}

int64_t num_draft_layers(const checkpoint::Checkpoint& checkpoint, const Config& config) {
  const bool has_dspark = config.has_dspark || checkpoint.find("mtp.0.main_proj.weight") != nullptr;
  return !has_dspark && checkpoint.find("mtp.0.enorm.weight") != nullptr ? 1 : 0;
}

LoadedModel load_model(const std::string& directory, const LoadOptions& options,
                       std::span<const ops::Backend* const> backends, const device::Machine& machine, LogSink* log,
                       ProgressSink* progress) {
  LoadedModel loaded;
  loaded.config = load_config(directory);
  const Config& config = loaded.config;
  const checkpoint::Checkpoint checkpoint = checkpoint::Checkpoint::open(directory);
  const int64_t drafts = options.with_draft ? num_draft_layers(checkpoint, config) : 0;
  const Inexact inexact = options.allow_inexact ? Inexact::kRound : Inexact::kRefuse;
  WeightSource weights(checkpoint, config, drafts, options.shard, progress, inexact);
  check_config_covers(weights, config, directory);
  const int64_t window_slots = ring_slots(config, options.max_step_tokens);
  const uint64_t state =
      sequence_bytes(config, options.precision, options.sequence_tokens, window_slots, options.shard.entry_ranks());
  const size_t step = Model::step_bytes(config, options.precision, options.max_step_tokens, options.shard.world);
  const uint64_t padding = padding_of(config, weights, drafts, options, backends, machine);
  check_fit(weights.total_bytes() + padding, state, step + static_cast<uint64_t>(options.extra_bytes), machine,
            padding);
  if (log != nullptr) {
    log_unused(weights, *log);
    for (const std::string& line : ops::unusable_names(backends, machine)) log->write(LogLevel::kWarning, line);
  }
  ops::Planner planner(backends, machine, options.forced);
  std::unique_ptr<device::Executor> executor = device::make_executor(machine, options.num_threads);
  weights.set_memory(executor->loading());
  const BytePhase phase(progress, "read weights", weights.total_bytes());
  const auto begin = std::chrono::steady_clock::now();
  weights.read_ahead();
  try {
    loaded.runner = std::make_unique<Model>(config, planner, weights, options.precision, drafts,
                                            options.max_step_tokens, std::move(executor), options.bypass, options.comm);
  } catch (const Error& error) {
    // Layers know ops and shapes, not files.
    const std::string message = error.what();
    if (error.code() != ErrorCode::kUnsupported || message.find(directory) != std::string::npos) throw;
    fail(ErrorCode::kUnsupported, fmt::format("{}: {}", printable(directory), message));
  }
  loaded.load_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (log != nullptr && weights.num_rounded_blocks() > 0) {
    log->write(LogLevel::kWarning, fmt::format("{} blocks of MXFP4 experts were rounded: NVFP4 can't hold them exactly",
                                               weights.num_rounded_blocks()));
  }
  loaded.plan.assign(planner.lines().begin(), planner.lines().end());
  return loaded;
}

}  // namespace tessera::model
