// SPDX-License-Identifier: Apache-2.0
#include "model/weight_source.h"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <span>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/integer_math.h"
#include "base/strings.h"
#include "model/draft_names.h"
#include "model/stored_values.h"

namespace tessera::model {

namespace {

using checkpoint::LocatedTensor;
using ops::WeightFormat;

// A disk of some GB/s fills it in a fraction of a second, and a slow matrix does not stop it.
constexpr uint64_t kReadAheadBytes = uint64_t{1} << 30;

// How many rows a tensor has, whose last dimension is a row's.
int64_t num_rows(const LocatedTensor& tensor) {
  const Shape& shape = tensor.entry->shape;
  int64_t rows = 1;
  for (int i = 0; i + 1 < shape.rank(); ++i) rows *= shape[i];
  return rows;
}

}  // namespace

WeightSource::WeightSource(const checkpoint::Checkpoint& checkpoint, const Config& config, int64_t num_draft_layers,
                           Shard shard, ProgressSink* progress, Inexact inexact)
    : config_(config),
      shard_(shard),
      num_draft_layers_(num_draft_layers),
      inexact_(inexact),
      reader_(progress, &queue_) {
  std::set<std::string> used;
  for (WeightRow& weight : make_weight_spec(config, num_draft_layers)) {
    const StoredTensor stored = resolve_weight(checkpoint, config, weight, used);
    weight.scale_rows = rows_of_a_scale(stored.format);
    for (const Shard& held : held_shards(weight, shard)) {
      const WeightSlice slice = slice_of(weight, config, held);
      const int64_t rows = slice.row_end - slice.row_begin, cols = slice.col_end - slice.col_begin;
      if (weight.kind == WeightKind::kLinear || weight.kind == WeightKind::kPlain) {
        const ops::WeightView view{format_in_memory(stored, weight.shape, slice), rows, cols};
        total_bytes_ += static_cast<uint64_t>(view.data_bytes() + view.scale_bytes());
      } else {
        total_bytes_ += static_cast<uint64_t>(weight.shape.num_elements()) * 4;
      }
    }
    stored_.emplace(weight.name, stored);
    rows_.emplace(weight.name, std::move(weight));
  }
  const DraftNames draft_names(config);
  for (const LocatedTensor& tensor : checkpoint.tensors()) {
    const std::string& name = tensor.entry->name;
    if (!used.contains(name)) (draft_names.has(name) ? kept_aside_ : unknown_).push_back(name);
  }
}

const WeightRow& WeightSource::row(const std::string& name) const {
  const auto at = rows_.find(name);
  TESSERA_CHECK(at != rows_.end(), name);
  return at->second;
}

const StoredTensor& WeightSource::resolved(const std::string& name) const {
  const auto at = stored_.find(name);
  TESSERA_CHECK(at != stored_.end(), name);
  return at->second;
}

ops::WeightFormat WeightSource::part_format(const std::string& name, const Shard& shard) const {
  const WeightRow& weight = row(name);
  return format_in_memory(resolved(name), weight.shape, slice_of(weight, config_, shard));
}

Shape WeightSource::part_shape(const std::string& name, const Shard& shard) const {
  const WeightSlice part = slice_of(row(name), config_, shard);
  return {part.row_end - part.row_begin, part.col_end - part.col_begin};
}

std::vector<checkpoint::FilePart> WeightSource::parts_of(const std::string& name, const Shard& shard) const {
  const StoredTensor& stored = resolved(name);
  const WeightSlice part = slice_of(row(name), config_, shard);
  std::vector<checkpoint::FilePart> parts;
  const auto add_all = [&](const LocatedTensor& tensor) {
    if (tensor.entry != nullptr) parts.push_back({tensor.file, tensor.entry->file_offset, tensor.entry->num_bytes});
  };
  const auto add_rows = [&](const LocatedTensor& tensor) {
    const uint64_t row_bytes = tensor.entry->num_bytes / static_cast<uint64_t>(std::max<int64_t>(1, num_rows(tensor)));
    parts.push_back({tensor.file,
                     tensor.entry->file_offset + static_cast<uint64_t>(part.row_begin + stored.row_offset) * row_bytes,
                     static_cast<uint64_t>(part.row_end - part.row_begin) * row_bytes});
  };
  const WeightKind kind = row(name).kind;
  if (kind != WeightKind::kLinear && kind != WeightKind::kPlain) {
    add_all(stored.codes);
    return parts;
  }
  if (part.row_begin == part.row_end) return parts;
  add_rows(stored.codes);
  // Of MXFP4 all scales decide the tensor's; those of FP8 are of blocks of rows.
  if (stored.format == StoredFormat::kNvfp4 || stored.format == StoredFormat::kNvfp4Reciprocal) {
    add_rows(stored.block_scales);
  } else {
    add_all(stored.block_scales);
  }
  add_all(stored.tensor_scale);
  return parts;
}

std::vector<checkpoint::FilePart> WeightSource::parts_in_order() const {
  std::vector<checkpoint::FilePart> parts, head, others;
  const auto append = [&](const std::vector<checkpoint::FilePart>& more) {
    parts.insert(parts.end(), more.begin(), more.end());
  };
  for (const WeightRow& weight : make_weight_spec(config_, num_draft_layers_)) {
    for (const Shard& held : held_shards(weight, shard_)) {
      if (held == shard_) continue;
      const std::vector<checkpoint::FilePart> more = parts_of(weight.name, held);
      others.insert(others.end(), more.begin(), more.end());
    }
    // The table names the head before the layers; a model loads it behind them, and drafts behind it.
    if (weight.shard == ShardRule::kRowsByToken) {
      head = parts_of(weight.name, shard_);
      continue;
    }
    if (weight.name.starts_with("mtp.")) append(std::exchange(head, {}));
    append(parts_of(weight.name, shard_));
  }
  append(head);
  append(others);
  return parts;
}

void WeightSource::read_ahead() {
  try {
    ahead_.emplace(parts_in_order(), kReadAheadBytes);
  } catch (const std::system_error&) {
    // No thread is left for it: all is read when it is wanted.
  }
}

void WeightSource::count_as_read(const std::string& name, const Shard& shard) {
  if (!ahead_) return;
  uint64_t num_bytes = 0;
  for (const checkpoint::FilePart& part : parts_of(name, shard)) num_bytes += part.num_bytes;
  ahead_->used(num_bytes);
}

// Of the hashes of pieces, so that threads can share the work.
void WeightSource::add_fingerprint(const std::string& name, const void* data, size_t bytes) {
  std::vector<uint64_t> hashes(ceil_div<size_t>(bytes, kPieceBytes));
  reader_.for_pieces(bytes, [&](uint64_t begin, uint64_t end) {
    for (uint64_t at = begin; at < end; at += kPieceBytes) {
      hashes[at / kPieceBytes] = XXH3_64bits(static_cast<const char*>(data) + at, std::min(kPieceBytes, end - at));
    }
  });
  fingerprint_ = XXH3_64bits_withSeed(name.data(), name.size(), fingerprint_);
  fingerprint_ = XXH3_64bits_withSeed(hashes.data(), hashes.size() * sizeof(uint64_t), fingerprint_);
}

// w1 and w3 are multiplied as one matrix by kernels that know one tensor scale, so they share it where it is chosen
// here.
const Mxfp4Scaling& WeightSource::scaling(const std::string& name) {
  std::string partner = name;
  if (name.ends_with(".w1") || name.ends_with(".w3")) partner.back() = name.back() == '1' ? '3' : '1';
  const auto other = stored_.find(partner);
  const bool is_shared = partner != name && other != stored_.end() && other->second.format == StoredFormat::kMxfp4;
  const std::string& key = is_shared ? std::min(name, partner) : name;
  if (const auto known = scalings_.find(key); known != scalings_.end()) return known->second;
  const StoredTensor* const matrices[] = {&resolved(name), is_shared ? &other->second : nullptr};
  return scalings_.emplace(key, mxfp4_scaling(std::span(matrices).first(is_shared ? 2 : 1))).first->second;
}

// Throws where the conversion loses something and nobody allowed it.
int WeightSource::global_exponent(const std::string& name) {
  const Mxfp4Scaling& found = scaling(name);
  if (found.num_unrepresentable > 0 && inexact_ == Inexact::kRefuse) {
    const LocatedTensor& codes = resolved(name).codes;
    fail(ErrorCode::kUnsupported,
         fmt::format("{}: tensor {}: expected MXFP4 blocks that NVFP4 holds exactly, at most 2^17 below the largest, "
                     "found {} of {} blocks (of all matrices that share a scale) further below; --allow-inexact rounds "
                     "them",
                     printable(codes.file->path()), printable(codes.entry->name), found.num_unrepresentable,
                     found.num_blocks));
  }
  return found.global_exponent;
}

Matrix WeightSource::load_part(const std::string& name, const Shard& shard, const ops::PackedLayout* layout) {
  const WeightRow& weight = row(name);
  const StoredTensor& stored = resolved(name);
  const WeightSlice part = slice_of(weight, config_, shard);
  count_as_read(name, shard);
  const bool is_empty = part.row_begin == part.row_end;
  const int exponent = stored.format == StoredFormat::kMxfp4 && !is_empty ? global_exponent(name) : 0;
  Matrix matrix = reader_.read(stored, weight.shape, part, exponent);
  if (edit_ != nullptr) edit_->edit(name, matrix);
  if (shard == shard_) {  // what else is held changes no result
    if (matrix.view.format == WeightFormat::kNvfp4) add_fingerprint(name, &matrix.view.tensor_scale, sizeof(float));
    add_fingerprint(name, matrix.data.data(), matrix.data.size());
    add_fingerprint(name, matrix.scales.data(), matrix.scales.size());
  }
  return layout == nullptr ? std::move(matrix) : packed(std::move(matrix), *layout, queue_);
}

device::Tensor WeightSource::load_vector_part(const std::string& name, const Shard& shard) {
  const WeightRow& weight = row(name);
  const StoredTensor& stored = resolved(name);
  count_as_read(name, shard);
  std::vector<char> bytes(stored.codes.entry->num_bytes);
  reader_.read_bytes(stored.codes, 0, bytes.size(), bytes.data());
  std::vector<float> values(static_cast<size_t>(weight.shape.num_elements()));
  widen(*stored.codes.entry->dtype, bytes.data(), weight.shape.num_elements(), values.data());
  check_finite(stored.codes, values.data(), weight.shape.num_elements());
  if (shard == shard_) add_fingerprint(name, bytes.data(), bytes.size());
  const WeightSlice part = slice_of(weight, config_, shard);
  const int64_t cols = weight.shape.rank() > 1 ? weight.shape[1] : 1, rows = part.row_end - part.row_begin;
  device::Tensor tensor(DType::kF32, weight.shape.rank() > 1 ? Shape{rows, cols} : Shape{rows});
  std::copy_n(values.data() + part.row_begin * cols, rows * cols, tensor.as<float>());
  if (edit_ != nullptr) edit_->edit_values(name, tensor);
  return tensor;
}

device::Tensor WeightSource::load_table(const std::string& name) {
  const WeightRow& weight = row(name);
  const StoredTensor& stored = resolved(name);
  const int64_t count = weight.shape.num_elements(), top_k = weight.shape[1];
  count_as_read(name, shard_);
  std::vector<char> bytes(stored.codes.entry->num_bytes);
  reader_.read_bytes(stored.codes, 0, bytes.size(), bytes.data());
  device::Tensor table(DType::kI32, weight.shape);
  int32_t* ids = table.as<int32_t>();
  for (int64_t i = 0; i < count; ++i) {
    int64_t id = 0;
    if (stored.codes.entry->dtype == DType::kI64) {
      std::memcpy(&id, bytes.data() + 8 * i, 8);
    } else {
      int32_t narrow = 0;
      std::memcpy(&narrow, bytes.data() + 4 * i, 4);
      id = narrow;
    }
    if (id < 0 || id >= config_.num_experts) {
      fail_value(stored.codes, i, fmt::format("an expert id below {}", config_.num_experts), fmt::format("{}", id));
    }
    for (int64_t j = i - i % top_k; j < i; ++j) {
      if (ids[j] == id) fail_value(stored.codes, i, "different experts in a row", fmt::format("{} twice", id));
    }
    ids[i] = static_cast<int32_t>(id);
  }
  add_fingerprint(name, bytes.data(), bytes.size());
  if (edit_ != nullptr) edit_->edit_values(name, table);
  return table;
}

}  // namespace tessera::model
