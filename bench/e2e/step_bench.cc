// SPDX-License-Identifier: Apache-2.0
#include "bench/e2e/step_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "backends/registry.h"
#include "base/error.h"
#include "base/integer_math.h"
#include "base/rng.h"
#include "base/strings.h"
#include "bench/e2e/bench_model.h"
#include "bench/shapes/published.h"
#include "bench/synthetic/random_caches.h"
#include "bench/synthetic/synthetic_weights.h"
#include "device/device_choice.h"
#include "model/memory_fit.h"
#include "model/model.h"
#include "model/sequence_caches.h"

namespace tessera::bench {

namespace {

// Numbers of steps are given and not worked out from times: ranks must make the same ones.
constexpr int64_t kWarmSteps = 3, kSumsInOne = 64, kStepsInOne = 16;

int64_t largest(const std::vector<int64_t>& values) {
  return *std::max_element(values.begin(), values.end());
}

// At once: beside those of every batch but the last there is the one that they are copies of.
int64_t most_sequences(const std::vector<int64_t>& batches) {
  int64_t most = batches.back();
  for (size_t i = 0; i + 1 < batches.size(); ++i) most = std::max(most, batches[i] + 1);
  return most;
}

void check(const StepOptions& options, const model::Config& config) {
  const auto fail_at = [](const char* what, const std::string& expected, int64_t found) {
    fail(ErrorCode::kInvalidArgument, fmt::format("{}: expected {}, found {}", what, expected, found));
  };
  TESSERA_CHECK(!options.contexts.empty() && !options.batches.empty() && options.steps > 0 && options.repeats > 0,
                "something to measure");
  const int64_t most = options.load.max_step_tokens;
  for (const int64_t batch : options.batches) {
    if (batch < 1 || batch > most) fail_at("batches", fmt::format("1 to {}, the tokens of a step", most), batch);
  }
  const int64_t longest = config.max_positions - options.steps - kWarmSteps;
  for (const int64_t context : options.contexts) {
    if (context < 1 || context > longest) {
      fail_at("contexts", fmt::format("1 to {}, the positions of this model without the steps", longest), context);
    }
  }
}

}  // namespace

// Caches are filled at whole windows of every compressor.
int64_t filled_tokens(const StepOptions& options, int64_t context) {
  return context <= options.most_computed ? 0 : round_up<int64_t>(context - options.load.max_step_tokens, 128);
}

model::Config config_of(const StepOptions& options) {
  const model::Config all = published_config(options.shape);
  return with_layers(all, options.num_layers > 0 ? options.num_layers : all.num_layers);
}

namespace {

class StepBench {
 public:
  StepBench(const StepOptions& options, const StepObserver& observer)
      : options_(options),
        observer_(observer),
        config_(config_of(options)),
        machine_(device::machine_of(options.device)),
        planner_(backends::all_backends(), machine_, options.load.forced),
        rng_(options.seed) {
    check(options, config_);
  }

  StepReport run() {
    make();
    if (observer_.on_made) observer_.on_made(report_);
    if (options_.load.comm != nullptr) time_sums();
    for (const int64_t context : options_.contexts) {
      std::unique_ptr<model::SequenceState> read = time_prompt(context);
      for (size_t i = 0; i < options_.batches.size(); ++i) {
        const int64_t batch = options_.batches[i];
        const bool is_last = i + 1 == options_.batches.size();
        time_decode(context, sequences_of(batch, is_last ? std::move(read) : copy_of(*read)));
      }
    }
    return std::move(report_);
  }

 private:
  void make() {
    const model::LoadOptions& load = options_.load;
    report_.device = machine_.gpu ? printable(machine_.gpu->name) : "cpu";
    report_.num_layers = config_.num_layers, report_.all_layers = published_config(options_.shape).num_layers;
    SyntheticWeights weights(config_, options_.seed, load.num_threads, load.shard, options_.dense);
    report_.weight_bytes = weights.total_bytes();
    const int64_t slots = model::ring_slots(config_, load.max_step_tokens);
    const auto sequences = static_cast<uint64_t>(most_sequences(options_.batches));
    const uint64_t state =
        sequences * model::sequence_bytes(config_, load.precision, capacity(largest(options_.contexts)), slots,
                                          load.shard.entry_ranks());
    // A matrix is packed from a copy.
    const uint64_t work = model::Model::step_bytes(config_, load.precision, load.max_step_tokens, load.shard.world) +
                          static_cast<uint64_t>(2 * config_.vocab_size * config_.hidden_size);
    model::check_fit(report_.weight_bytes, state, work, machine_);
    const double begin = seconds_now();
    std::unique_ptr<device::Executor> executor = device::make_executor(machine_, load.num_threads);
    weights.make_in(*executor, machine_);
    model_ = std::make_unique<model::Model>(config_, planner_, weights, load.precision, 0, load.max_step_tokens,
                                            std::move(executor), load.bypass, load.comm);
    model_->executor().synchronize();
    report_.make_seconds = seconds_now() - begin;
    report_.variants = variants_of(planner_.lines());
  }

  int64_t filled(int64_t context) const { return filled_tokens(options_, context); }

  int64_t capacity(int64_t context) const { return context + 2 * (options_.steps + kWarmSteps); }

  std::vector<int32_t> random_ids(int64_t count) {
    std::vector<int32_t> ids(static_cast<size_t>(count));
    for (int32_t& id : ids) id = static_cast<int32_t>(rng_.below(static_cast<uint64_t>(config_.vocab_size)));
    return ids;
  }

  // Prompts from the first token to the last; the sequence of the last one, for decode steps.
  std::unique_ptr<model::SequenceState> time_prompt(int64_t context) {
    StepRow row;
    row.context = context, row.is_prompt = true, row.filled = filled(context);
    std::unique_ptr<model::SequenceState> state;
    for (int64_t i = -1; i < options_.repeats; ++i) {
      state.reset();
      state = model_->new_sequence(capacity(context));
      if (row.filled > 0) fill_caches(*state, row.filled, options_.seed, options_.load.num_threads);
      const int64_t computed = context - row.filled;
      const std::vector<int32_t> ids = random_ids(computed);
      model::Draw next;
      const double begin = seconds_now();
      for (int64_t at = 0; at < computed;) {
        const int64_t count = std::min(model_->max_step_tokens(), computed - at);
        const model::SequenceSlice slice{state.get(),
                                         std::span(ids).subspan(static_cast<size_t>(at), static_cast<size_t>(count)),
                                         model::LogitRows::kNone, at + count == computed ? &next : nullptr};
        model_->step({&slice, 1});
        at += count;
      }
      // The first is not counted.
      if (i >= 0) row.time.seconds.push_back(seconds_now() - begin);
    }
    add(std::move(row));
    return state;
  }

  // Each sequence has entries of its own, or what one has read another would find in the GPU's cache.
  std::unique_ptr<model::SequenceState> copy_of(const model::SequenceState& read) const {
    std::unique_ptr<model::SequenceState> copy = read.fork();
    auto* caches = dynamic_cast<model::SequenceCaches*>(copy.get());
    TESSERA_CHECK(caches != nullptr, "a sequence of model::Model");
    caches->make_room(0, caches->position());
    return copy;
  }

  // The first of them, and copies of it.
  std::vector<std::unique_ptr<model::SequenceState>> sequences_of(int64_t batch,
                                                                  std::unique_ptr<model::SequenceState> first) const {
    std::vector<std::unique_ptr<model::SequenceState>> states;
    states.push_back(std::move(first));
    for (int64_t i = 1; i < batch; ++i) states.push_back(copy_of(*states.front()));
    return states;
  }

  void time_decode(int64_t context, const std::vector<std::unique_ptr<model::SequenceState>>& states) {
    StepRow row;
    row.context = context, row.sequences = static_cast<int64_t>(states.size()), row.filled = filled(context);
    const std::vector<int32_t> first = random_ids(row.sequences);
    std::vector<model::Draw> draws(states.size());
    for (size_t i = 0; i < draws.size(); ++i) draws[i].token = first[i];
    std::vector<int32_t> ids(draws.size());
    std::vector<model::SequenceSlice> slices;
    for (size_t i = 0; i < draws.size(); ++i) {
      slices.push_back({states[i].get(), {&ids[i], 1}, model::LogitRows::kNone, &draws[i]});
    }
    for (int64_t step = -kWarmSteps; step < options_.steps; ++step) {
      for (size_t i = 0; i < ids.size(); ++i) ids[i] = draws[i].token;
      const double begin = seconds_now();
      model_->step(slices);
      if (step >= 0) row.time.seconds.push_back(seconds_now() - begin);
    }
    time_ahead(slices, ids, draws, row.ahead);
    for (int64_t i = 0; i < options_.repeats; ++i) {
      const double begin = seconds_now();
      if (!model_->repeat_step(kStepsInOne)) break;
      row.kernels.seconds.push_back((seconds_now() - begin) / static_cast<double>(kStepsInOne));
    }
    add(std::move(row));
  }

  void time_ahead(const std::vector<model::SequenceSlice>& slices, std::vector<int32_t>& ids,
                  std::vector<model::Draw>& draws, Samples& ahead) {
    if (!model_->can_run_ahead()) return;
    // No page is taken between the steps.
    for (const model::SequenceSlice& slice : slices) {
      dynamic_cast<model::SequenceCaches&>(*slice.state).make_room(0, slice.state->capacity());
    }
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = draws[i].token;
    std::vector<model::Draw> others = draws;
    std::vector<model::Draw*> places[2];
    for (size_t i = 0; i < draws.size(); ++i) places[0].push_back(&others[i]), places[1].push_back(&draws[i]);
    const int64_t last = options_.steps - 1;
    model_->queue_step(slices);
    double begin = seconds_now();
    for (int64_t step = -kWarmSteps; step <= last; ++step) {
      if (step < last) {
        const bool is_queued = model_->queue_next(places[(step + kWarmSteps) % 2]);
        TESSERA_CHECK(is_queued, "a step of sequences that have room");
      }
      model_->finish_step();
      const double end = seconds_now();
      if (step >= 0) ahead.seconds.push_back(end - begin);
      begin = end;
    }
  }

  void time_sums() {
    for (const int64_t tokens : options_.batches) {
      const Shape hidden{tokens, config_.hidden_size}, slots{tokens * config_.experts_per_token, config_.hidden_size};
      time_sum("hidden, BF16", tokens, DType::kBF16, hidden);
      time_sum("hidden, F32 to BF16", tokens, DType::kF32, hidden);
      time_sum("expert slots, BF16", tokens, DType::kBF16, slots);
    }
  }

  void time_sum(const char* name, int64_t tokens, DType dtype, const Shape& shape) {
    device::Executor& executor = model_->executor();
    comm::Communicator& comm = *options_.load.comm;
    const device::Tensor in(dtype, shape, executor.memory()), out(DType::kBF16, shape, executor.memory());
    SumRow row{name, tokens, in.view().num_bytes(), {}};
    auto queue_all = [&] {
      for (int64_t i = 0; i < kSumsInOne; ++i) comm.all_reduce(in.view(), out.view(), executor.queue());
    };
    // Neither the first calls nor the first launch is counted.
    std::unique_ptr<device::Recording> recording;
    for (int64_t i = -2; i < options_.repeats; ++i) {
      comm.begin_step(true);
      if (i == -1 && executor.can_record()) recording = executor.record(queue_all);
      const double begin = seconds_now();
      recording != nullptr ? recording->launch() : queue_all();
      executor.synchronize();
      const double seconds = seconds_now() - begin;
      comm.end_step();
      if (i >= 0) row.time.seconds.push_back(seconds / static_cast<double>(kSumsInOne));
    }
    if (observer_.on_sum) observer_.on_sum(row);
    report_.sums.push_back(std::move(row));
  }

  void add(StepRow row) {
    if (observer_.on_row) observer_.on_row(row);
    report_.rows.push_back(std::move(row));
  }

  const StepOptions& options_;
  const StepObserver& observer_;
  const model::Config config_;
  const device::Machine machine_;
  ops::Planner planner_;
  Rng rng_;
  std::unique_ptr<model::Model> model_;
  StepReport report_;
};

}  // namespace

StepReport run_steps(const StepOptions& options, const StepObserver& observer) {
  return StepBench(options, observer).run();
}

}  // namespace tessera::bench
