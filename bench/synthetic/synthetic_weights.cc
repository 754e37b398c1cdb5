// SPDX-License-Identifier: Apache-2.0
#include "bench/synthetic/synthetic_weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "backends/registry.h"
#include "base/error.h"
#include "bench/ops/timing.h"
#include "model/parallel_plan.h"
#include "numeric/fp8_block.h"

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
    const WeightFormat format = model::published_format(row, dense);
    for (const model::Shard& held : model::held_shards(row, shard_)) {
      total_bytes_ += static_cast<uint64_t>(bytes_of(row, format, shape_of(row, held)));
    }
    const std::string name = row.name;
    tensors_.emplace(name, Tensor{std::move(row), format});
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
                       fill("values", FillKind::kNormal, DType::kBF16)});
}

const SyntheticWeights::Tensor& SyntheticWeights::tensor(const std::string& name) const {
  const auto at = tensors_.find(name);
  TESSERA_CHECK(at != tensors_.end(), name);
  return at->second;
}

Shape SyntheticWeights::shape_of(const model::WeightRow& row, const model::Shard& shard) const {
  const model::WeightSlice slice = model::slice_of(row, config_, shard);
  const int64_t rows = slice.row_end - slice.row_begin;
  return row.shape.rank() == 1 ? Shape{rows} : Shape{rows, slice.col_end - slice.col_begin};
}

std::vector<SyntheticWeights::Piece> SyntheticWeights::pieces_of(const model::WeightRow& row,
                                                                 const model::Shard& shard) const {
  uint64_t hash = seed_ ^ 0xCBF29CE484222325;
  for (const char c : row.name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  // No two ranks have the same part, and nobody's is the whole's.
  const auto seed_of = [&](int64_t rank) { return ops::random_word(hash, static_cast<uint64_t>(rank + 1)); };
  const Shape shape = shape_of(row, shard);
  if (shape != row.shape) return {{0, shape[0], seed_of(shard.rank)}};
  const Shape own = shape_of(row, shard_);
  // Scales of FP8 are of so many rows.
  const bool parts_scales = row.kind == WeightKind::kLinear && own[0] % numeric::kFp8WeightBlock != 0;
  if (own == row.shape || parts_scales) return {{0, shape[0], seed_of(-1)}};
  std::vector<Piece> pieces;
  for (int64_t rank = 0; rank < shard_.world; ++rank) pieces.push_back({rank * own[0], own[0], seed_of(rank)});
  return pieces;
}

WeightFormat SyntheticWeights::part_format(const std::string& name, const model::Shard& /*shard*/) const {
  return tensor(name).format;
}

Shape SyntheticWeights::part_shape(const std::string& name, const model::Shard& shard) const {
  return shape_of(tensor(name).row, shard);
}

int64_t SyntheticWeights::layer_bytes(int64_t layer, double num_experts) const {
  const std::string prefix = fmt::format("layers.{}.", layer);
  int64_t dense = 0, experts = 0;
  for (auto at = tensors_.lower_bound(prefix); at != tensors_.end() && at->first.starts_with(prefix); ++at) {
    const auto& [row, format] = at->second;
    const Shape shape = shape_of(row, shard_);
    // Of the routing table a token reads one row: nothing.
    if (row.kind != WeightKind::kTable) (row.expert >= 0 ? experts : dense) += bytes_of(row, format, shape);
  }
  return dense + static_cast<int64_t>(static_cast<double>(experts / config_.num_experts) * num_experts);
}

model::Matrix SyntheticWeights::load_part(const std::string& name, const model::Shard& shard,
                                          const ops::PackedLayout* layout) {
  const Tensor& weight = tensor(name);
  const Shape shape = shape_of(weight.row, shard);
  model::Matrix matrix;
  ops::WeightView& view = matrix.view;
  view.format = weight.format;
  view.rows = shape[0], view.cols = shape[1];
  const Maker* maker = layout == nullptr && maker_ ? &*maker_ : nullptr;  // packing is the host's work
  device::MemorySpace& memory = maker == nullptr ? device::host_memory() : maker->executor.memory();
  matrix.data = device::Buffer(static_cast<size_t>(view.data_bytes()), memory);
  matrix.scales = device::Buffer(static_cast<size_t>(view.scale_bytes()), memory);
  view.data = matrix.data.data();
  view.block_scales = matrix.scales.data();
  view.scales_fold = view.format == WeightFormat::kFp8Block;  // fill()
  // The embedding's rows have unit values, other maps rows of about unit length, over all ranks; FP8, whose scales are
  // powers of two, within a factor of 1.5, or 2.3 where a row has a single block.
  const double factor = name == "embed" ? 1 : 1 / std::sqrt(static_cast<double>(weight.row.shape[1]));
  if (view.format != WeightFormat::kBf16 && view.format != WeightFormat::kFp8Block) {
    view.tensor_scale = static_cast<float>(factor / kCodeTimesScale);
  }
  auto* data = static_cast<uint8_t*>(matrix.data.data());
  auto* scales = static_cast<uint8_t*>(matrix.scales.data());
  for (const Piece& piece : pieces_of(weight.row, shard)) {
    const ops::WeightView part{view.format, piece.num_rows, view.cols};
    fill(maker, part, piece.seed, factor, data, scales);
    data += part.data_bytes(), scales += part.scale_bytes();
  }
  if (layout == nullptr) return matrix;
  const double start = seconds_now();
  model::Matrix result = model::packed(std::move(matrix), *layout, queue_);
  pack_seconds_ += seconds_now() - start;
  packed_bytes_ += static_cast<int64_t>(result.data.size() + result.scales.size());
  return result;
}

// Codes, or values, and scales of as many rows and columns as `part` says.
void SyntheticWeights::fill(const Maker* maker, const ops::WeightView& part, uint64_t seed, double factor, void* data,
                            void* scales) {
  const auto run = [&](ops::Bound<ops::RandomFill> Maker::*op, ops::RandomFill::Desc desc,
                       const ops::RandomFill::Args& args) {
    if (maker == nullptr) return ops::random_fill_reference(desc, args, queue_);
    (maker->*op).run(args, maker->executor.queue());
  };
  const int64_t count = part.rows * part.cols;
  switch (part.format) {
    case WeightFormat::kBf16:
      run(&Maker::values, {FillKind::kNormal, DType::kBF16},
          {.out = data, .count = count, .seed = seed, .spread = static_cast<float>(factor)});
      break;
    case WeightFormat::kFp8Block: {
      run(&Maker::e4m3, {FillKind::kE4m3, DType::kU8}, {.out = data, .count = count, .seed = seed});
      // Powers of two, as the official checkpoints' are: two neighbours, the root of whose mean square is
      // 1.6 times the lower.
      const double lower = std::exp2(std::round(std::log2(factor / kE4m3Code / 1.6)));
      std::vector<float> values(static_cast<size_t>(part.scale_bytes()) / sizeof(float));
      for (size_t i = 0; i < values.size(); ++i) {
        const bool is_lower = ops::random_word(~seed, static_cast<int64_t>(i)) % 2 == 0;
        values[i] = static_cast<float>(is_lower ? lower : 2 * lower);
      }
      device::MemorySpace& memory = maker == nullptr ? device::host_memory() : maker->executor.memory();
      memory.upload(scales, values.data(), values.size() * sizeof(float));
      break;
    }
    default:
      run(&Maker::codes, {FillKind::kCodes, DType::kU8}, {.out = data, .count = part.data_bytes(), .seed = seed});
      run(&Maker::scales, {FillKind::kScales, DType::kU8}, {.out = scales, .count = part.scale_bytes(), .seed = ~seed});
  }
}

device::Tensor SyntheticWeights::load_vector_part(const std::string& name, const model::Shard& shard) {
  const model::WeightRow& row = tensor(name).row;
  device::Tensor tensor(DType::kF32, shape_of(row, shard));
  float center = 0, spread = 0.3f;
  if (name.ends_with(".weight")) center = 1, spread = 0.1f;
  if (name.ends_with("_scale")) center = 0.7f, spread = 0.1f;
  if (name.ends_with("_fn")) spread = 1 / std::sqrt(static_cast<float>(row.shape[1]));
  if (name.ends_with("gate.bias")) spread = 0.05f;
  const int64_t width = tensor.view().shape.num_elements() / tensor.view().shape[0];
  for (const Piece& piece : pieces_of(row, shard)) {
    float* values = tensor.as<float>() + piece.first_row * width;
    for (int64_t i = 0; i < piece.num_rows * width; ++i) {
      values[i] = center + spread * ops::random_normal(piece.seed, i);
    }
  }
  return tensor;
}

device::Tensor SyntheticWeights::load_table(const std::string& name) {
  const model::WeightRow& row = tensor(name).row;
  device::Tensor tensor(DType::kI32, row.shape);
  const int64_t top_k = row.shape[1];
  const uint64_t seed = pieces_of(row, shard_).front().seed;
  int64_t draws = 0;
  for (int64_t token = 0; token < row.shape[0]; ++token) {
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
