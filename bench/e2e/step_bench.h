// SPDX-License-Identifier: Apache-2.0
#pragma once
// Whole steps of a model of random weights, as an engine makes them, alone or shared by several ranks: prompts,
// decode steps of many sequences, and the sums over ranks by themselves.
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "bench/ops/timing.h"
#include "model/load_model.h"

namespace tessera::bench {

struct StepOptions {
  std::string shape = "flash";                          // published_config
  int64_t num_layers = 0;                               // 0: all
  uint64_t seed = 1;                                    // of weights and tokens
  ops::WeightFormat dense = ops::WeightFormat::kNvfp4;  // SyntheticWeights
  std::vector<int64_t> contexts = {8192};
  std::vector<int64_t> batches = {1, 32, 128};  // sequences of a decode step
  int64_t steps = 32;                           // decode steps measured of each batch
  int64_t repeats = 5;                          // prompts, and rounds of sums, measured
  int64_t most_computed = 131072;               // of a longer prompt the last step alone, behind random cache entries
  std::string device = "cpu";                   // device::machine_of
  // What a rank has and with whom; max_step_tokens is at least the largest batch.
  model::LoadOptions load;
};

// What is made: the shape with as many of its layers. Throws kInvalidArgument for a shape that is not known, or more
// layers than it has.
model::Config config_of(const StepOptions& options);

struct StepRow {
  int64_t context = 0;    // tokens of each sequence before a decode step, or of the prompt
  int64_t sequences = 1;  // of a decode step
  bool is_prompt = false;
  int64_t filled = 0;  // of the context's tokens: with random cache entries (fill_caches)
  Samples time;        // of a step with its tokens in host memory; of all computed steps of a prompt
  // Of a recorded decode step, launched many times behind each other: its kernels, with what lies between them, without
  // the host's part and copies. A sample is the mean of one such round, of the last step's tokens.
  Samples kernels;
  // The same steps, each queued behind the one before as engines do it (Runner::queue_next): from the end of one to the
  // end of the next. None where nothing is recorded.
  Samples ahead;
  int64_t tokens() const { return is_prompt ? context - filled : sequences; }
  double tokens_per_second() const { return static_cast<double>(tokens()) / time.quantile(0.5); }
  // The part of a step outside of that; none where it was not measured. Of a step's few thousandths it may come out
  // below zero, since the two are measured behind each other.
  std::optional<double> outside_of_kernels() const {
    if (kernels.seconds.empty()) return std::nullopt;
    return 1 - kernels.quantile(0.5) / time.quantile(0.5);
  }
};

// A sum over ranks, many in one recording: a sample is their mean.
struct SumRow {
  std::string name;  // what is summed: "hidden, BF16"
  int64_t tokens = 0, bytes = 0;
  Samples time;
};

struct StepReport {
  std::string device;
  int64_t num_layers = 0, all_layers = 0;
  uint64_t weight_bytes = 0;  // of this rank
  double make_seconds = 0;
  std::vector<std::string> variants;  // as ModelReport
  std::vector<StepRow> rows;
  std::vector<SumRow> sums;  // of several ranks only
};

// What is called as results come; each may be empty.
struct StepObserver {
  std::function<void(const StepReport&)> on_made;  // before the first row
  std::function<void(const SumRow&)> on_sum;
  std::function<void(const StepRow&)> on_row;
};

// Of a prompt of `context` tokens: those that get random cache entries, so that at most one step is left.
int64_t filled_tokens(const StepOptions& options, int64_t context);

// All ranks of load.comm call it together with the same options: each makes its own steps and has the same tokens.
// Throws kInvalidArgument for batches and contexts that the model can't hold, kResourceExhausted with figures where a
// rank's share does not fit.
StepReport run_steps(const StepOptions& options, const StepObserver& observer);

}  // namespace tessera::bench
