// SPDX-License-Identifier: Apache-2.0
#pragma once
// One layer of each kind alone, in the shape of a published model: what a step spends per layer, without the layers
// around it and without the memory that all of them take.
#include <functional>
#include <string>
#include <vector>

#include "bench/e2e/layer_bench.h"
#include "model/load_model.h"

namespace tessera::bench {

struct LayerKind {
  const char* name;
  int64_t ratio;  // as in model::Config::compress_ratios
};
constexpr LayerKind kLayerKinds[] = {{"swa", 0}, {"csa", 4}, {"hca", 128}};

// One layer of that ratio, routed by score, with a small embedding.
model::Config one_layer(const model::Config& config, int64_t ratio);

struct LayerOptions {
  std::string shape = "flash";  // published_config
  std::string kind = "all";     // swa (window only), csa (ratio 4 with indexer), hca (ratio 128)
  int64_t context = 4096;       // before the tokens, in whole windows of 128; their cache entries are random
  int64_t tokens = 64;          // of a chunk, beside one token
  uint64_t seed = 1;
  double seconds = 0.5;  // per row, at least
  std::string device = "cpu";
  ops::WeightFormat dense = ops::WeightFormat::kNvfp4;  // SyntheticWeights
  model::LoadOptions load;                              // max_step_tokens and bypass are not read
};

struct KindRows {
  std::string kind;
  uint64_t weight_bytes = 0;  // of the layer and a small embedding
  double make_seconds = 0;
  std::vector<LayerRow> rows;  // one token, then LayerOptions::tokens where those are more
};

struct LayerReport {
  std::string device;
  bool is_on_gpu = false;
  int num_threads = 0;
  int64_t context = 0;
  Ceilings ceilings;
  std::vector<KindRows> kinds;
};

// `on_kind` may be empty. Throws kInvalidArgument for a kind that the shape does not have, kResourceExhausted with
// figures where a layer does not fit.
LayerReport run_layer(const LayerOptions& options,
                      const std::function<void(const LayerReport&, const KindRows&)>& on_kind);

}  // namespace tessera::bench
