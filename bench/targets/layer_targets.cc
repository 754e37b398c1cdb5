// SPDX-License-Identifier: Apache-2.0
// Layers of each kind: decode steps as they are recorded, kernel by kernel, and a prefill.
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "backends/registry.h"
#include "bench/e2e/bench_layer.h"
#include "bench/shapes/published.h"
#include "bench/synthetic/random_caches.h"
#include "bench/targets/target_rows.h"
#include "device/device_choice.h"
#include "model/weight_spec.h"

namespace tessera::bench {

namespace {

constexpr double kBatchRead = 0.75, kPrefillTflops = 0.65 * 800;

struct Sizes {
  const char* shape;
  int64_t context, chunk;  // before a decode step; of a prefill, whose second half is measured behind its first
  std::vector<int64_t> batches;
};

// How attention's maps and the shared expert are stored, and the time wanted of a token's mean layer.
struct Storage {
  ops::WeightFormat dense;
  const char* suffix;
  double mean_us;
};
constexpr Storage kStorages[] = {{ops::WeightFormat::kNvfp4, "", 56},
                                 {ops::WeightFormat::kFp8Block, ", FP8 dense", 74}};

// A layer of random weights where it computes.
struct LayerModel {
  LayerModel(const TargetOptions& options, const device::Machine& machine, const model::Config& layer, int64_t tokens,
             ops::WeightFormat dense)
      : config(layer), weights(config, 1, 0, {}, dense), planner(backends::all_backends(), machine, options.forced) {
    std::unique_ptr<device::Executor> executor = device::make_executor(machine, 0);
    weights.make_in(*executor, machine);
    model.emplace(config, planner, weights, ops::Precision{}, 0, tokens, std::move(executor), model::Bypass{});
    bench.emplace(*model, config, weights, machine, 1);
  }
  std::unique_ptr<model::SequenceState> sequence(int64_t position, int64_t capacity) {
    auto state = model->new_sequence(capacity);
    if (position > 0) fill_caches(*state, position, 1);
    return state;
  }

  const model::Config config;
  SyntheticWeights weights;
  ops::Planner planner;
  std::optional<model::Model> model;
  std::optional<LayerBench> bench;
};

TargetRow row_of(const char* part, const std::string& name, LayerRow row) {
  TargetRow target{part, name, "", row.tokens, row.bytes, 0, row.calls, {}, {}, {}, {}};
  target.time = std::move(row.time), target.read_time = std::move(row.read_time);
  return target;
}

// Multiplications and additions of so many tokens behind `position`: of matrices, of attention's keys, of index keys.
int64_t layer_flops(const model::Config& c, int64_t position, int64_t tokens) {
  int64_t dense = 0, experts = 0;
  for (const model::WeightRow& row : model::make_weight_spec(c, 0)) {
    const bool is_matrix = row.kind == model::WeightKind::kLinear || row.kind == model::WeightKind::kPlain;
    if (!is_matrix || !row.name.starts_with("layers.")) continue;
    (row.expert >= 0 ? experts : dense) += row.shape.num_elements();
  }
  int64_t flops = 2 * tokens * (dense + experts / c.num_experts * c.experts_per_token);
  const int64_t ratio = c.compress_ratios[0];
  for (int64_t at = position; at < position + tokens; ++at) {
    const int64_t entries = ratio == 0 ? 0 : (at + 1) / ratio,
                  taken = ratio == 4 ? std::min(entries, c.index_topk) : entries;
    flops += 4 * (std::min(at + 1, c.sliding_window) + taken) * c.num_heads * c.head_dim;
    if (ratio == 4) flops += 2 * entries * c.index_num_heads * c.index_head_dim;
  }
  return flops;
}

// Of a kind's layers in the whole model and of all.
struct Mean {
  double time = 0, read = 0, layers = 0;
};

void add_layers(const TargetOptions& options, const Storage& storage, const TakeTargetRow& take) {
  const Sizes sizes = options.is_small ? Sizes{"small", 256, 128, {1, 2}} : Sizes{"flash", 8192, 4096, {1, 32, 128}};
  const model::Config all = published_config(sizes.shape);
  const device::Machine machine = device::machine_of(options.device);
  std::vector<Mean> means(sizes.batches.size());
  bool has_all = true;
  for (const LayerKind& kind : kLayerKinds) {
    const std::string name = fmt::format("{} layer {}{}", sizes.shape, kind.name, storage.suffix);
    if (name.find(options.only) == std::string::npos) {
      has_all = false;
      continue;
    }
    const model::Config config = one_layer(all, kind.ratio);
    const auto layers =
        static_cast<double>(std::count(all.compress_ratios.begin(), all.compress_ratios.end(), kind.ratio));
    {
      LayerModel layer(options, machine, config, sizes.batches.back(), storage.dense);
      std::vector<std::unique_ptr<model::SequenceState>> states;
      std::vector<model::SequenceState*> batch;
      for (size_t i = 0; i < sizes.batches.size(); ++i) {
        while (std::ssize(batch) < sizes.batches[i]) {
          states.push_back(layer.sequence(sizes.context, sizes.context + 1));
          batch.push_back(states.back().get());
        }
        const LayerBatch of{batch, 1};
        TargetRow row = row_of("layer, decode", name, layer.bench->time(of, 0, options.seconds));
        row.launches = layer.bench->launches(of, 0);
        if (i > 0 && !options.is_small) row.target.share_of_read = kBatchRead;
        means[i].time += layers * row.time.quantile(0.5), means[i].read += layers * row.read_time.quantile(0.5);
        means[i].layers += layers;
        take(std::move(row));
      }
    }
    LayerModel layer(options, machine, config, sizes.chunk, storage.dense);
    for (const int64_t position : {int64_t{0}, sizes.chunk}) {
      const auto state = layer.sequence(position, 2 * sizes.chunk);
      TargetRow row = row_of("layer, prefill", fmt::format("{} behind {}", name, position),
                             layer.bench->time(*state, 0, sizes.chunk, options.seconds));
      row.flops = layer_flops(config, position, sizes.chunk);
      if (!options.is_small) row.target.tflops = kPrefillTflops;
      take(std::move(row));
    }
  }
  if (!has_all) return;
  for (size_t i = 0; i < means.size(); ++i) {
    TargetRow row{"layer, decode",
                  fmt::format("{} mean of all layers{}", sizes.shape, storage.suffix),
                  "",
                  sizes.batches[i],
                  0,
                  0,
                  1,
                  {},
                  {},
                  {},
                  {}};
    row.time.seconds = {means[i].time / means[i].layers}, row.read_time.seconds = {means[i].read / means[i].layers};
    if (!options.is_small) {
      if (i == 0) row.target.us = storage.mean_us;
      if (i > 0) row.target.share_of_read = kBatchRead;
    }
    take(std::move(row));
  }
}

}  // namespace

void add_layer_targets(const TargetOptions& options, const TakeTargetRow& take) {
  for (const Storage& storage : kStorages) add_layers(options, storage, take);
}

}  // namespace tessera::bench
