// SPDX-License-Identifier: Apache-2.0
#include "bench/synthetic/synthetic_weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "backends/registry.h"
#include "base/error.h"
#include "bench/ops/timing.h"
#include "model/parallel_plan.h"

namespace tessera::bench {

namespace {

using model::WeightKind;
using ops::WeightFormat;

using FillKind = ops::RandomFill::Kind;

// Roots of the mean squares of what random codes stand for.
constexpr double kCodeTimesScale = 4.97, kE4m3Code = 0.598;

bool is_matrix(const model::WeightRow& row) {
  return row.kind == WeightKind::kLinear || row.kind == WeightKind::kPlain;
}

int64_t bytes_of(const model::WeightRow& row, WeightFormat format, const Shape& shape) {
  if (!is_matrix(row)) return shape.num_elements() * 4;
  const ops::WeightView view{format, shape[0], shape[1]};
  return view.data_bytes() + view.scale_bytes();
}

}  // namespace

SyntheticWeights::SyntheticWeights(const model::Config& config, uint64_t seed, int num_threads,
                                   const model::Shard& shard, WeightFormat dense)
    : config_(config), seed_(seed), shard_(shard), queue_(num_threads) {
  for (model::WeightRow& row : model::make_weight_spec(config, 0)) {
    const model::WeightSlice slice = model::slice_of(row, config_, shard_);
    const int64_t rows = slice.row_end - slice.row_begin, cols = slice.col_end - slice.col_begin;
    Part part{row, model::published_format(row, dense), row.shape.rank() == 1 ? Shape{rows} : Shape{rows, cols}, false};
    part.is_cut = part.shape != row.shape;
    total_bytes_ += static_cast<uint64_t>(bytes_of(part.row, part.format, part.shape));
    parts_.emplace(row.name, std::move(part));
  }
}

void SyntheticWeights::make_in(device::Executor& executor, const device::Machine& machine) {
  if (executor.memory().is_host()) return;
  ops::Planner planner(backends::all_backends(), machine);
  const auto fill = [&](const char* what, FillKind kind, DType dtype) {
    return planner.bind<ops::RandomFill>(what, {kind, dtype});
  };
  maker_.emplace(Maker{executor, fill("codes", FillKind::kCodes, DType::kU8),
                       fill("scales", FillKind::kScales, DType::kU8), fill("E4M3 codes", FillKind::kE4m3, DType::kU8),
                       fill("values", FillKind::kNormal, DType::kBF16),
                       fill("factors", FillKind::kNormal, DType::kF32)});
}

const SyntheticWeights::Part& SyntheticWeights::part(const std::string& name) const {
  const auto at = parts_.find(name);
  TESSERA_CHECK(at != parts_.end(), name);
  return at->second;
}

uint64_t SyntheticWeights::seed_of(const std::string& name) const {
  uint64_t hash = seed_ ^ 0xCBF29CE484222325;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  // No two ranks have the same part.
  return ops::random_word(hash, part(name).is_cut ? static_cast<uint64_t>(shard_.rank + 1) : 0);
}

WeightFormat SyntheticWeights::format(const std::string& name) const {
  return part(name).format;
}

Shape SyntheticWeights::local_shape(const std::string& name) const {
  return part(name).shape;
}

int64_t SyntheticWeights::layer_bytes(int64_t layer, double num_experts) const {
  const std::string prefix = fmt::format("layers.{}.", layer);
  int64_t dense = 0, experts = 0;
  for (auto at = parts_.lower_bound(prefix); at != parts_.end() && at->first.starts_with(prefix); ++at) {
    const auto& [row, format, shape, is_cut] = at->second;
    // Of the routing table a token reads one row: nothing.
    if (row.kind != WeightKind::kTable) (row.expert >= 0 ? experts : dense) += bytes_of(row, format, shape);
  }
  return dense + static_cast<int64_t>(static_cast<double>(experts / config_.num_experts) * num_experts);
}

model::Matrix SyntheticWeights::load_matrix(const std::string& name, const ops::PackedLayout* layout) {
  const Part& weight = part(name);
  model::Matrix matrix;
  ops::WeightView& view = matrix.view;
  view.format = weight.format;
  view.rows = weight.shape[0], view.cols = weight.shape[1];
  const Maker* maker = layout == nullptr && maker_ ? &*maker_ : nullptr;  // packing is the host's work
  device::MemorySpace& memory = maker == nullptr ? device::host_memory() : maker->executor.memory();
  matrix.data = device::Buffer(static_cast<size_t>(view.data_bytes()), memory);
  matrix.scales = device::Buffer(static_cast<size_t>(view.scale_bytes()), memory);
  view.data = matrix.data.data();
  view.block_scales = matrix.scales.data();
  const uint64_t seed = seed_of(name);
  // The embedding's rows have unit values, other maps rows of about unit length, over all ranks.
  const double factor = name == "embed" ? 1 : 1 / std::sqrt(static_cast<double>(weight.row.shape[1]));
  const auto fill = [&](ops::Bound<ops::RandomFill> Maker::*op, ops::RandomFill::Desc desc,
                        const ops::RandomFill::Args& args) {
    if (maker == nullptr) return ops::random_fill_reference(desc, args, queue_);
    (maker->*op).run(args, maker->executor.queue());
  };
  void *const data = matrix.data.data(), *const scales = matrix.scales.data();
  const int64_t count = view.rows * view.cols;
  switch (view.format) {
    case WeightFormat::kBf16:
      fill(&Maker::values, {FillKind::kNormal, DType::kBF16},
           {.out = data, .count = count, .seed = seed, .spread = static_cast<float>(factor)});
      break;
    case WeightFormat::kFp8Block: {
      fill(&Maker::e4m3, {FillKind::kE4m3, DType::kU8}, {.out = data, .count = count, .seed = seed});
      const auto center = static_cast<float>(factor / kE4m3Code);
      fill(&Maker::factors, {FillKind::kNormal, DType::kF32},
           {.out = scales, .count = view.scale_bytes() / 4, .seed = ~seed, .center = center, .spread = center / 50});
      break;
    }
    default:
      fill(&Maker::codes, {FillKind::kCodes, DType::kU8}, {.out = data, .count = view.data_bytes(), .seed = seed});
      fill(&Maker::scales, {FillKind::kScales, DType::kU8},
           {.out = scales, .count = view.scale_bytes(), .seed = ~seed});
      view.tensor_scale = static_cast<float>(factor / kCodeTimesScale);
  }
  if (layout == nullptr) return matrix;
  const double start = seconds_now();
  model::Matrix result = model::packed(std::move(matrix), *layout, queue_);
  pack_seconds_ += seconds_now() - start;
  packed_bytes_ += static_cast<int64_t>(result.data.size() + result.scales.size());
  return result;
}

device::Tensor SyntheticWeights::load_vector(const std::string& name) {
  const Part& weight = part(name);
  device::Tensor tensor(DType::kF32, weight.shape);
  float center = 0, spread = 0.3f;
  if (name.ends_with(".weight")) center = 1, spread = 0.1f;
  if (name.ends_with("_scale")) center = 0.7f, spread = 0.1f;
  if (name.ends_with("_fn")) spread = 1 / std::sqrt(static_cast<float>(weight.shape[1]));
  if (name.ends_with("gate.bias")) spread = 0.05f;
  const uint64_t seed = seed_of(name);
  for (int64_t i = 0; i < weight.shape.num_elements(); ++i) {
    tensor.as<float>()[i] = center + spread * ops::random_normal(seed, i);
  }
  return tensor;
}

device::Tensor SyntheticWeights::load_table(const std::string& name) {
  const Part& weight = part(name);
  device::Tensor tensor(DType::kI32, weight.shape);
  const int64_t top_k = weight.shape[1];
  const uint64_t seed = seed_of(name);
  int64_t draws = 0;
  for (int64_t token = 0; token < weight.shape[0]; ++token) {
    int32_t* ids = tensor.as<int32_t>() + token * top_k;
    for (int64_t taken = 0; taken < top_k;) {
      const auto id =
          static_cast<int32_t>(ops::random_word(seed, draws++) % static_cast<uint64_t>(config_.num_experts));
      if (std::find(ids, ids + taken, id) == ids + taken) ids[taken++] = id;
    }
  }
  return tensor;
}

}  // namespace tessera::bench
