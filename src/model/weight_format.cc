// SPDX-License-Identifier: Apache-2.0
#include "model/weight_format.h"

#include <fmt/format.h>

#include <vector>

#include "base/error.h"
#include "base/integer_math.h"
#include "base/strings.h"
#include "model/weight_names.h"
#include "numeric/fp8_block.h"
#include "numeric/mxfp4.h"
#include "numeric/nvfp4.h"

namespace tessera::model {

namespace {

using checkpoint::Checkpoint;
using checkpoint::LocatedTensor;

constexpr int64_t kNvfp4Group = numeric::kNvfp4Block, kMxfp4Group = numeric::kMxfp4Block;
constexpr int64_t kFp8Block = numeric::kFp8WeightBlock;

[[noreturn]] void fail_tensor(const LocatedTensor& tensor, const std::string& expected, const std::string& found) {
  fail_data(tensor.file->path(), fmt::format("tensor {}", tensor.entry->name), expected, found);
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

  // The one of several spellings that is there, or nothing. Two of them could disagree, and only one would be right.
  LocatedTensor find_only(const std::vector<std::string>& names) {
    LocatedTensor only;
    for (const std::string& name : names) {
      const LocatedTensor found = find(name);
      if (found.entry == nullptr) continue;
      if (only.entry != nullptr) {
        fail_tensor(only, "to be there under one name only", fmt::format("{} too", found.entry->name));
      }
      only = found;
    }
    return only;
  }

  StoredTensor plain(const LocatedTensor& tensor, const Shape& shape) {
    check_shape(tensor, shape);
    if (!is_float(tensor)) fail_tensor(tensor, "BF16 or F32", described(tensor));
    StoredTensor stored;
    stored.format = has_dtype(tensor, DType::kF32) ? StoredFormat::kF32 : StoredFormat::kBf16;
    stored.codes = tensor;
    return stored;
  }

  // A linear map whose values or codes are `weight`: PATH.weight, or PATH.weight_packed of compressed-tensors.
  StoredTensor linear(const std::string& path, const LocatedTensor& weight, const Shape& shape) {
    const bool is_packed = weight.entry->name.ends_with("_packed");
    if (!is_packed && is_float(weight)) return plain(weight, shape);
    // Static activation scales are known and not needed: activations are rounded by their own range or not at all.
    find(path + ".input_scale");
    find(path + ".input_global_scale");
    if (!is_packed && has_dtype(weight, DType::kF8E4M3)) return fp8_block(path, weight, shape);
    if (has_dtype(weight, DType::kU8) || has_dtype(weight, DType::kI8) || has_dtype(weight, DType::kF4)) {
      return fp4(path, weight, shape);
    }
    fail_tensor(weight, is_packed ? "packed FP4 codes in U8" : "BF16, F32, F8_E4M3, or packed FP4 codes",
                described(weight));
  }

 private:
  StoredTensor fp8_block(const std::string& path, const LocatedTensor& weight, const Shape& shape) {
    check_shape(weight, shape);
    StoredTensor stored;
    stored.format = StoredFormat::kFp8Block;
    stored.codes = weight;
    stored.block_scales = find_only({path + ".scale", path + ".weight_scale_inv", path + ".weight_scale"});
    const LocatedTensor& scales = stored.block_scales;
    if (scales.entry == nullptr) {
      fail_tensor(weight, fmt::format("block scales in {}.scale or {}.weight_scale_inv", path, path), "no such tensor");
    }
    if (!has_dtype(scales, DType::kF8E8M0) && !is_float(scales)) {
      fail_tensor(scales, "F8_E8M0, F32 or BF16 block scales", described(scales));
    }
    check_shape(scales, {ceil_div(shape[0], kFp8Block), ceil_div(shape[1], kFp8Block)});
    return stored;
  }

  // The block scales tell NVFP4 (E4M3 per 16) from MXFP4 (E8M0 per 32), whatever they are called.
  StoredTensor fp4(const std::string& path, const LocatedTensor& weight, const Shape& shape) {
    const LocatedTensor scales = find_only({path + ".weight_scale", path + ".scale"});
    if (scales.entry == nullptr) {
      fail_tensor(weight, fmt::format("block scales in {}.weight_scale or {}.scale", path, path), "no such tensor");
    }
    const LocatedTensor global = find_only({path + ".weight_scale_2", path + ".weight_global_scale"});
    if (has_dtype(scales, DType::kF8E4M3)) return nvfp4(path, weight, scales, global, shape);
    if (!has_dtype(scales, DType::kF8E8M0) && !has_dtype(scales, DType::kU8)) {
      fail_tensor(scales, "block scales of NVFP4 (F8_E4M3) or MXFP4 (F8_E8M0)", described(scales));
    }
    if (global.entry != nullptr) {
      fail_tensor(global, "no tensor scale beside MXFP4's F8_E8M0 block scales", described(global));
    }
    check_groups(weight, shape, kMxfp4Group, "MXFP4");
    check_shape(scales, {shape[0], shape[1] / kMxfp4Group});
    StoredTensor stored;
    stored.format = StoredFormat::kMxfp4;
    stored.codes = weight, stored.block_scales = scales;
    return stored;
  }

  StoredTensor nvfp4(const std::string& path, const LocatedTensor& weight, const LocatedTensor& scales,
                     const LocatedTensor& global, const Shape& shape) {
    const bool is_packed = weight.entry->name.ends_with("_packed");
    if (!has_dtype(weight, DType::kU8)) fail_tensor(weight, "U8 codes of NVFP4", described(weight));
    check_groups(weight, shape, kNvfp4Group, "NVFP4");
    check_shape(scales, {shape[0], shape[1] / kNvfp4Group});
    // One is the other's reciprocal: which of them it is, both names must say.
    const std::string expected = path + (is_packed ? ".weight_global_scale" : ".weight_scale_2");
    if (global.entry == nullptr || global.entry->name != expected) {
      fail_data(weight.file->path(), fmt::format("tensor {}", expected),
                fmt::format("the F32 scale of {}", weight.entry->name),
                global.entry == nullptr ? "no such tensor" : fmt::format("{} instead", global.entry->name));
    }
    if (!has_dtype(global, DType::kF32) || global.entry->shape.num_elements() != 1) {
      fail_tensor(global, "one F32 value", described(global));
    }
    StoredTensor stored;
    stored.format = is_packed ? StoredFormat::kNvfp4Reciprocal : StoredFormat::kNvfp4;
    stored.codes = weight, stored.block_scales = scales, stored.tensor_scale = global;
    return stored;
  }

  // Two codes in a byte, or one in an element of four bits.
  static void check_groups(const LocatedTensor& weight, const Shape& shape, int64_t group, const char* format) {
    if (shape[1] % group != 0) {
      fail_tensor(weight, fmt::format("input features in multiples of {} for {}", group, format),
                  fmt::format("{}", shape[1]));
    }
    check_shape(weight, {shape[0], has_dtype(weight, DType::kF4) ? shape[1] : shape[1] / 2});
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
  fail_data(checkpoint.directory(), fmt::format("tensor {}", name),
            hf.empty() ? "it to be in the checkpoint" : fmt::format("it, or {}", hf), "neither");
}

StoredTensor resolve_linear(Resolver& resolver, const Checkpoint& checkpoint, const Config& config,
                            const WeightRow& row) {
  std::vector<std::string> paths = hf_names(row.name);
  paths.insert(paths.begin(), row.name);
  for (const std::string& path : paths) {
    const bool is_plain = row.kind == WeightKind::kPlain;
    const LocatedTensor weight =
        is_plain ? resolver.find(path + ".weight") : resolver.find_only({path + ".weight", path + ".weight_packed"});
    if (weight.entry == nullptr) continue;
    return is_plain ? resolver.plain(weight, row.shape) : resolver.linear(path, weight, row.shape);
  }
  const FusedExpert where = hf_fused_expert(row.name);
  if (!where.tensor.empty()) {
    const LocatedTensor fused = resolver.find(where.tensor);
    if (fused.entry != nullptr) return resolve_fused(resolver, fused, where, config, row);
  }
  fail_missing(checkpoint, row.name + ".weight", paths.size() == 1 ? "" : paths[1] + ".weight");
}

}  // namespace

std::string_view to_string(StoredFormat format) {
  switch (format) {
    case StoredFormat::kF32:
      return "f32";
    case StoredFormat::kBf16:
      return "bf16";
    case StoredFormat::kFp8Block:
      return "fp8-block";
    case StoredFormat::kNvfp4:
      return "nvfp4";
    case StoredFormat::kNvfp4Reciprocal:
      return "nvfp4 (compressed-tensors)";
    case StoredFormat::kMxfp4:
      return "mxfp4";
  }
  return "?";
}

int64_t rows_of_a_scale(StoredFormat format) {
  return format == StoredFormat::kFp8Block ? kFp8Block : 1;
}

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
