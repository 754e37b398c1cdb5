// SPDX-License-Identifier: Apache-2.0
#include "model/weight_format.h"

#include <fmt/format.h>

#include <vector>

#include "base/error.h"
#include "base/strings.h"
#include "model/weight_names.h"

namespace tessera::model {

namespace {

using checkpoint::Checkpoint;
using checkpoint::LocatedTensor;
using ops::WeightFormat;

constexpr int64_t kNvfp4Group = 16, kMxfp4Group = 32, kFp8Block = 128;

int64_t blocks(int64_t count, int64_t block) {
  return (count + block - 1) / block;
}

[[noreturn]] void fail_tensor(const LocatedTensor& tensor, const std::string& expected, const std::string& found) {
  fail_data(tensor.file->path(), fmt::format("tensor {}", tensor.entry->name), expected, found);
}

[[noreturn]] void fail_unsupported(const LocatedTensor& tensor, const std::string& what) {
  fail(ErrorCode::kUnsupported,
       fmt::format("{}: tensor {}: {}; this version reads NVFP4 (ModelOpt), FP8 128x128 blocks, BF16 and F32",
                   printable(tensor.file->path()), printable(tensor.entry->name), what));
}

std::string described(const LocatedTensor& tensor) {
  return fmt::format("{} {}", tensor.entry->dtype_text, tensor.entry->shape.to_string());
}

bool has_dtype(const LocatedTensor& tensor, DType dtype) {
  return tensor.entry->dtype == dtype;
}

void check_shape(const LocatedTensor& tensor, const Shape& shape) {
  if (!(tensor.entry->shape == shape)) {
    fail_tensor(tensor, fmt::format("shape {}", shape.to_string()), described(tensor));
  }
}

bool is_float(const LocatedTensor& tensor) {
  return has_dtype(tensor, DType::kF32) || has_dtype(tensor, DType::kBF16);
}

class Resolver {
 public:
  Resolver(const Checkpoint& checkpoint, std::set<std::string>& used) : checkpoint_(checkpoint), used_(used) {}

  // The tensor of that name, or nothing (an entry of nullptr).
  LocatedTensor find(const std::string& name) {
    const LocatedTensor* found = checkpoint_.find(name);
    if (found == nullptr) return {};
    used_.insert(name);
    return *found;
  }

  StoredTensor plain(const LocatedTensor& tensor, const Shape& shape) {
    check_shape(tensor, shape);
    if (!is_float(tensor)) fail_tensor(tensor, "BF16 or F32", described(tensor));
    StoredTensor stored;
    stored.format = has_dtype(tensor, DType::kF32) ? WeightFormat::kF32 : WeightFormat::kBf16;
    stored.codes = tensor;
    return stored;
  }

  // A linear map whose values or codes are `weight` = PATH.weight.
  StoredTensor linear(const std::string& path, const LocatedTensor& weight, const Shape& shape) {
    if (is_float(weight)) return plain(weight, shape);
    const int64_t rows = shape[0], cols = shape[1];
    if (has_dtype(weight, DType::kF8E4M3)) return fp8_block(path, weight, shape);
    const bool is_packed =
        has_dtype(weight, DType::kU8) || has_dtype(weight, DType::kI8) || has_dtype(weight, DType::kF4);
    if (!is_packed) fail_tensor(weight, "BF16, F32, F8_E4M3, or packed FP4 codes in U8", described(weight));
    const LocatedTensor scales = find(path + ".weight_scale");
    if (scales.entry == nullptr) {
      if (find(path + ".scale").entry != nullptr) fail_unsupported(weight, "MXFP4 codes with E8M0 scales");
      fail_tensor(weight, fmt::format("block scales in {}.weight_scale", path), "no such tensor");
    }
    if (scales.entry->shape == Shape{rows, cols / kMxfp4Group} && !has_dtype(scales, DType::kF8E4M3)) {
      fail_unsupported(weight, "MXFP4 codes with E8M0 scales");
    }
    if (!has_dtype(weight, DType::kU8)) fail_tensor(weight, "U8 codes of NVFP4", described(weight));
    if (cols % kNvfp4Group != 0) {
      fail_tensor(weight, fmt::format("input features in multiples of {} for NVFP4", kNvfp4Group),
                  fmt::format("{}", cols));
    }
    check_shape(weight, {rows, cols / 2});
    if (!has_dtype(scales, DType::kF8E4M3)) fail_tensor(scales, "F8_E4M3 block scales", described(scales));
    check_shape(scales, {rows, cols / kNvfp4Group});
    const LocatedTensor global = find(path + ".weight_scale_2");
    if (global.entry == nullptr) {
      fail_data(weight.file->path(), fmt::format("tensor {}.weight_scale_2", path), "the F32 scale of its NVFP4 weight",
                "no such tensor");
    }
    if (!has_dtype(global, DType::kF32) || global.entry->shape.num_elements() != 1) {
      fail_tensor(global, "one F32 value", described(global));
    }
    find(path + ".input_scale");  // known, not needed: activations are dynamic or BF16
    StoredTensor stored;
    stored.format = WeightFormat::kNvfp4;
    stored.codes = weight, stored.block_scales = scales, stored.tensor_scale = global;
    return stored;
  }

 private:
  StoredTensor fp8_block(const std::string& path, const LocatedTensor& weight, const Shape& shape) {
    check_shape(weight, shape);
    LocatedTensor scales;
    for (const char* suffix : {".scale", ".weight_scale_inv", ".weight_scale"}) {
      if (scales.entry == nullptr) scales = find(path + suffix);
    }
    if (scales.entry == nullptr) {
      fail_tensor(weight, fmt::format("block scales in {}.scale or {}.weight_scale_inv", path, path), "no such tensor");
    }
    if (!has_dtype(scales, DType::kF8E8M0) && !is_float(scales)) {
      fail_tensor(scales, "F8_E8M0, F32 or BF16 block scales", described(scales));
    }
    check_shape(scales, {blocks(shape[0], kFp8Block), blocks(shape[1], kFp8Block)});
    StoredTensor stored;
    stored.format = WeightFormat::kFp8Block;
    stored.codes = weight, stored.block_scales = scales;
    return stored;
  }

  const Checkpoint& checkpoint_;
  std::set<std::string>& used_;
};

// Experts fused into one tensor [E, parts * rows, cols]: this expert's rows.
StoredTensor resolve_fused(Resolver& resolver, const LocatedTensor& fused, const FusedExpert& where,
                           const Config& config, const WeightRow& row) {
  const int64_t rows = row.shape[0], cols = row.shape[1];
  StoredTensor stored = resolver.plain(fused, {config.num_experts, where.parts * rows, cols});
  stored.row_offset = (where.expert * where.parts + where.part) * rows;
  return stored;
}

[[noreturn]] void fail_missing(const Checkpoint& checkpoint, const std::string& name, const std::string& hf) {
  if (checkpoint.find(name + "_packed") != nullptr) {
    fail_unsupported(*checkpoint.find(name + "_packed"), "a compressed-tensors weight");
  }
  fail_data(checkpoint.directory(), fmt::format("tensor {}", name),
            hf.empty() ? "it to be in the checkpoint" : fmt::format("it, or {}", hf), "neither");
}

StoredTensor resolve_linear(Resolver& resolver, const Checkpoint& checkpoint, const Config& config,
                            const WeightRow& row) {
  std::vector<std::string> paths = hf_names(row.name);
  paths.insert(paths.begin(), row.name);
  for (const std::string& path : paths) {
    const LocatedTensor weight = resolver.find(path + ".weight");
    if (weight.entry == nullptr) continue;
    return row.kind == WeightKind::kPlain ? resolver.plain(weight, row.shape)
                                          : resolver.linear(path, weight, row.shape);
  }
  const FusedExpert where = hf_fused_expert(row.name);
  if (!where.tensor.empty()) {
    const LocatedTensor fused = resolver.find(where.tensor);
    if (fused.entry != nullptr) return resolve_fused(resolver, fused, where, config, row);
  }
  fail_missing(checkpoint, row.name + ".weight", paths.size() == 1 ? "" : paths[1] + ".weight");
}

}  // namespace

StoredTensor resolve_weight(const Checkpoint& checkpoint, const Config& config, const WeightRow& row,
                            std::set<std::string>& used) {
  Resolver resolver(checkpoint, used);
  if (row.kind == WeightKind::kLinear || row.kind == WeightKind::kPlain) {
    return resolve_linear(resolver, checkpoint, config, row);
  }
  LocatedTensor tensor = resolver.find(row.name);
  const std::vector<std::string> others = hf_names(row.name);
  for (const std::string& name : others) {
    if (tensor.entry == nullptr) tensor = resolver.find(name);
  }
  if (tensor.entry == nullptr) fail_missing(checkpoint, row.name, others.empty() ? "" : others.front());
  if (row.kind == WeightKind::kVector) return resolver.plain(tensor, row.shape);
  check_shape(tensor, row.shape);
  if (!has_dtype(tensor, DType::kI64) && !has_dtype(tensor, DType::kI32)) {
    fail_tensor(tensor, "I64 or I32", described(tensor));
  }
  StoredTensor stored;
  stored.codes = tensor;
  return stored;
}

}  // namespace tessera::model
