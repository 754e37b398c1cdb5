// SPDX-License-Identifier: Apache-2.0
#include "bench/e2e/bench_model.h"

#include <fmt/format.h>

#include <algorithm>

#include "backends/registry.h"
#include "base/error.h"
#include "base/rng.h"
#include "bench/shapes/published.h"
#include "bench/synthetic/random_caches.h"
#include "bench/synthetic/synthetic_weights.h"
#include "device/device_choice.h"
#include "model/memory_fit.h"
#include "model/model.h"

namespace tessera::bench {

namespace {

using model::LogitRows;

std::vector<int32_t> random_ids(int64_t seed, int64_t count, int32_t vocab_size) {
  Rng rng(static_cast<uint64_t>(seed));
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int32_t& id : ids) id = static_cast<int32_t>(rng.below(static_cast<uint64_t>(vocab_size)));
  return ids;
}

// Prefill of `ids` into a sequence, then `decode_tokens` greedy tokens.
void run_once(model::Runner& runner, model::SequenceState& state, const std::vector<int32_t>& ids,
              int64_t decode_tokens, ModelRow& row) {
  const auto count = static_cast<int64_t>(ids.size());
  model::Draw greedy;
  const double start = seconds_now();
  for (int64_t at = 0; at < count;) {
    const int64_t size = std::min(runner.max_step_tokens(), count - at);
    const bool is_last = at + size == count;
    const model::SequenceSlice slice{&state, std::span(ids).subspan(static_cast<size_t>(at), static_cast<size_t>(size)),
                                     LogitRows::kNone, is_last ? &greedy : nullptr};
    runner.step({&slice, 1});
    at += size;
  }
  const double middle = seconds_now();
  for (int64_t i = 0; i < decode_tokens; ++i) {
    const int32_t next = greedy.token;
    const model::SequenceSlice slice{&state, {&next, 1}, LogitRows::kNone, &greedy};
    runner.step({&slice, 1});
  }
  row.prefill_tokens_per_second.push_back(static_cast<double>(count) / (middle - start));
  row.decode_tokens_per_second.push_back(static_cast<double>(decode_tokens) / (seconds_now() - middle));
}

// The contexts to run. Throws kInvalidArgument for one that the model can't hold.
std::vector<int64_t> contexts_of(const model::Runner& runner, const ModelOptions& options) {
  const int64_t most = runner.facts().max_positions - options.decode_tokens;
  std::vector<int64_t> contexts = options.contexts;
  if (contexts.empty()) {
    contexts = {std::clamp<int64_t>(most, 1, 512), std::clamp<int64_t>(most, 1, 4096)};
    contexts.erase(std::unique(contexts.begin(), contexts.end()), contexts.end());
  }
  for (const int64_t context : contexts) {
    if (context > most) {
      fail(ErrorCode::kInvalidArgument,
           fmt::format(
               "contexts: expected at most {}, the {} positions of this model without the {} tokens of --decode, "
               "found {}",
               std::max<int64_t>(most, 0), runner.facts().max_positions, options.decode_tokens, context));
    }
  }
  return contexts;
}

// Rows at every context. `filled` says how many of a context's tokens get random cache entries.
template <class Filled>
std::vector<ModelRow> run_contexts(model::Runner& runner, const ModelOptions& options,
                                   const std::vector<int64_t>& contexts, const ModelObserver& observer,
                                   const Filled& filled) {
  std::vector<ModelRow> rows;
  for (const int64_t context : contexts) {
    const int64_t capacity = context + options.decode_tokens;
    ModelRow row{context, filled(context), {}, {}};
    const std::vector<int32_t> ids = random_ids(context, context - row.filled, runner.facts().vocab_size);
    for (int64_t i = -1; i < options.repeats; ++i) {
      const auto state = runner.new_sequence(capacity);
      if (row.filled > 0) fill_caches(*state, row.filled, options.seed);
      // The first is not counted.
      ModelRow unused;
      run_once(runner, *state, ids, i < 0 ? 1 : options.decode_tokens, i < 0 ? unused : row);
    }
    if (observer.on_row) observer.on_row(row);
    rows.push_back(std::move(row));
  }
  return rows;
}

uint64_t needed_bytes(const ModelOptions& options, const model::Config& config, uint64_t weights, uint64_t& state,
                      uint64_t& work) {
  const model::LoadOptions& load = options.load;
  int64_t longest = 0;
  for (const int64_t context : options.contexts) longest = std::max(longest, context + options.decode_tokens);
  state = model::sequence_bytes(config, load.precision, longest, model::ring_slots(config, load.max_step_tokens));
  // A matrix is packed from a copy.
  const int64_t matrix = 2 * config.vocab_size * config.hidden_size;
  work = model::Model::step_bytes(config, load.precision, load.max_step_tokens) +
         static_cast<uint64_t>(LayerBench::kReadBytes + matrix);
  return weights + state + work;
}

// One token through each layer at the longest context.
void run_layers(model::Model& model, const model::Config& config, const SyntheticWeights& weights,
                const ModelOptions& options, const device::Machine& machine, SyntheticModel& made) {
  const int64_t context = *std::max_element(options.contexts.begin(), options.contexts.end()) / 128 * 128;
  const auto state = model.new_sequence(context + 1);
  if (context > 0) fill_caches(*state, context, options.seed);
  LayerBench bench(model, config, weights, machine, options.seed);
  made.ceilings = bench.ceilings();
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    made.layers.push_back(bench.time(*state, layer, 1, 0.5));
  }
}

ModelReport run_synthetic(const ModelOptions& options, const ModelObserver& observer) {
  const device::Machine machine = device::machine_of(options.device);
  const model::Config all = published_config(options.synthetic);
  ModelReport report;
  SyntheticModel& made = report.synthetic;
  made.all_layers = all.num_layers;
  made.num_layers =
      options.num_layers > 0
          ? options.num_layers
          : layers_that_fit(options,
                            (machine.gpu ? machine.gpu->memory_free_bytes : machine.memory_available_bytes) / 10 * 9);
  const model::Config config = with_layers(all, made.num_layers);
  SyntheticWeights weights(config, options.seed, options.load.num_threads, {}, options.dense);
  made.weight_bytes = weights.total_bytes();
  uint64_t state = 0, work = 0;
  needed_bytes(options, config, made.weight_bytes, state, work);
  model::check_fit(made.weight_bytes, state, work, machine);

  const double start = seconds_now();
  ops::Planner planner(backends::all_backends(), machine, options.load.forced);
  std::unique_ptr<device::Executor> executor = device::make_executor(machine, options.load.num_threads);
  weights.make_in(*executor, machine);
  model::Model model(config, planner, weights, options.load.precision, 0, options.load.max_step_tokens,
                     std::move(executor), options.load.bypass);
  model.executor().synchronize();
  made.make_seconds = seconds_now() - start;
  report.variants = variants_of(planner.lines());
  made.pack_seconds = weights.pack_seconds();
  made.packed_bytes = weights.packed_bytes();
  made.peak_bytes = device::peak_memory_bytes();
  run_layers(model, config, weights, options, machine, made);
  if (observer.on_made) observer.on_made(made);
  // States are filled at whole windows of every compressor.
  report.rows = run_contexts(model, options, contexts_of(model, options), observer, [&](int64_t context) {
    return std::max<int64_t>(0, context - options.load.max_step_tokens) / 128 * 128;
  });
  return report;
}

}  // namespace

int64_t layers_that_fit(const ModelOptions& options, uint64_t available) {
  const model::Config all = published_config(options.synthetic);
  int64_t fitting = 1;
  for (int64_t layers = 2; layers <= all.num_layers; ++layers) {
    const model::Config config = with_layers(all, layers);
    uint64_t state = 0, work = 0;
    if (needed_bytes(options, config, SyntheticWeights(config, 0, 1, {}, options.dense).total_bytes(), state, work) >
        available)
      break;
    fitting = layers;
  }
  return fitting;
}

ModelReport run_model(const ModelOptions& options, const ModelObserver& observer) {
  if (!options.synthetic.empty()) return run_synthetic(options, observer);
  const model::LoadedModel loaded = model::load_model(options.directory, options.load, backends::all_backends(),
                                                      device::machine_of(options.device), nullptr, nullptr);
  ModelReport report;
  const std::vector<int64_t> contexts = contexts_of(*loaded.runner, options);  // before anything is said of the model
  report.load = {static_cast<uint64_t>(loaded.runner->facts().weight_bytes), loaded.load_seconds};
  if (observer.on_loaded) observer.on_loaded(report.load);
  report.variants = variants_of(loaded.plan);
  report.rows = run_contexts(*loaded.runner, options, contexts, observer, [](int64_t) { return int64_t{0}; });
  return report;
}

}  // namespace tessera::bench
