// SPDX-License-Identifier: Apache-2.0
#pragma once
// Prefill and decode of one sequence at several context lengths: of a real model, or of random weights in the shape of
// a published one.
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "bench/e2e/layer_bench.h"
#include "model/load_model.h"

namespace tessera::bench {

struct ModelOptions {
  std::string directory;   // of a real model
  std::string synthetic;   // "flash", "pro", "small"; empty: the real model
  int64_t num_layers = 0;  // of a synthetic model; 0: as many as fit into nine tenths of the memory that is available
  uint64_t seed = 1;       // of synthetic weights
  ops::WeightFormat dense = ops::WeightFormat::kNvfp4;  // SyntheticWeights
  model::LoadOptions load;
  std::string device = "cpu";     // device::machine_of
  std::vector<int64_t> contexts;  // empty (not with `synthetic`): 512 and 4,096, or as many as the model takes
  int64_t decode_tokens = 64;     // greedy, after each prefill
  int64_t repeats = 5;
};

struct ModelRow {
  int64_t context = 0;
  int64_t filled = 0;  // of these, tokens whose cache entries are random and not computed (synthetic models only)
  std::vector<double> prefill_tokens_per_second, decode_tokens_per_second;  // one per repeat
};

struct SyntheticModel {
  int64_t num_layers = 0, all_layers = 0;
  uint64_t weight_bytes = 0;
  double make_seconds = 0;  // making and packing the weights
  double pack_seconds = 0;  // of that, packing
  int64_t packed_bytes = 0;
  uint64_t peak_bytes = 0;  // of physical memory in this process, when all weights were made and packed
  Ceilings ceilings;
  std::vector<LayerRow> layers;  // one token through each at the longest context
};

// A checkpoint's weights on their way from its files to where the ops find them.
struct LoadTime {
  uint64_t bytes = 0;
  double seconds = 0;
};

struct ModelReport {
  LoadTime load;  // unless ModelOptions::synthetic is given
  std::vector<ModelRow> rows;
  std::vector<std::string> variants;  // "backend.variant", each that computes an op of the model once, sorted
  SyntheticModel synthetic;           // where ModelOptions::synthetic is given
};

// What is called as results come; each may be empty.
struct ModelObserver {
  std::function<void(const LoadTime&)> on_loaded;
  std::function<void(const SyntheticModel&)> on_made;  // before the first row
  std::function<void(const ModelRow&)> on_row;
};

// Throws kInvalidArgument for a context that the model can't hold. A synthetic model computes at most
// load.max_step_tokens tokens of a prefill, those before the frontier; the cache entries of the tokens before them are
// filled with random values. Throws kResourceExhausted with figures where the model doesn't fit.
ModelReport run_model(const ModelOptions& options, const ModelObserver& observer);

// "backend.variant", each of a plan once, sorted. Lines: of ops::PlanLine.
template <class Lines>
std::vector<std::string> variants_of(const Lines& lines) {
  std::set<std::string> variants;
  for (const ops::PlanLine& line : lines) variants.insert(line.chosen);
  return {variants.begin(), variants.end()};
}

// A picture of the rows, and of the layers where there are any. `model` and `machine` are said in its title.
std::string model_svg(const ModelReport& report, const std::string& model, const std::string& machine);

// Layers that `available` bytes hold for a shape, at least 1.
int64_t layers_that_fit(const ModelOptions& options, uint64_t available);

}  // namespace tessera::bench
