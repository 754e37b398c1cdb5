// SPDX-License-Identifier: Apache-2.0
// The scales of every matrix: values that no scale may have, and numbers of them that no quantiser makes.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <span>

#include "base/error.h"
#include "doctor/check.h"
#include "model/load_model.h"
#include "model/mxfp4_scaling.h"
#include "model/weight_format.h"
#include "model/weight_spec.h"
#include "numeric/bf16.h"
#include "numeric/nvfp4.h"

namespace tessera::doctor {

namespace {

using checkpoint::Checkpoint;
using checkpoint::LocatedTensor;
using model::StoredFormat;
using model::StoredTensor;
using model::WeightRow;

constexpr uint64_t kReadBytes = 4 << 20;
constexpr double kManyZero = 0.05;  // share of block scales that may be zero
// Blocks at the largest scale are looked at where they are more than this. A quantiser that works by the largest value
// makes any number of them in a small matrix, so their number alone says nothing.
constexpr double kManyTop = 0.05;
constexpr uint8_t kTop = 0x7E, kBelowTop = 0x7D;  // 448 and 416
constexpr int64_t kLeastBlocks = 64;
// Blocks that were clipped hold several codes of the largest size, +-6; one scaled by its largest value holds one or
// two.
constexpr double kClippedRatio = 2, kClippedMore = 0.5, kUsualLargest = 1.5;
constexpr double kSpike = 4;  // scales of 448 for each of 416, where amax makes about one

struct ScaleCounts {
  int64_t total = 0, zero = 0, top = 0, below_top = 0;
};

class ScaleChecker {
 public:
  explicit ScaleChecker(std::vector<Finding>& findings) : findings_(findings) {}

  void block_scales(const StoredTensor& stored) {
    const LocatedTensor& tensor = stored.block_scales;
    if (!seen_.insert(tensor.entry->name).second) return;  // fused experts
    const auto dtype = tensor.entry->dtype;
    if (dtype == DType::kF8E4M3) {
      ScaleCounts counts;
      for_bytes(tensor, [&](uint8_t byte, int64_t i) {
        ++counts.total, counts.zero += byte == 0, counts.top += byte == kTop, counts.below_top += byte == kBelowTop;
        if (byte > kTop) bad(tensor, i, "a positive E4M3 scale (0x00 to 0x7e)", byte);
      });
      judge(stored, counts);
    } else if (dtype == DType::kF8E8M0 || dtype == DType::kU8) {
      for_bytes(tensor, [&](uint8_t byte, int64_t i) {
        if (byte == 0xFF) bad(tensor, i, "an E8M0 scale (0x00 to 0xfe)", byte);
      });
    } else {
      numbers(tensor, 0);
    }
  }

  void tensor_scale(const LocatedTensor& tensor) { numbers(tensor, std::numeric_limits<float>::denorm_min()); }

 private:
  template <class See>
  void for_bytes(const LocatedTensor& tensor, See see) {
    num_bad_ = 0;
    std::vector<uint8_t> part(std::min(kReadBytes, tensor.entry->num_bytes));
    for (uint64_t done = 0; done < tensor.entry->num_bytes; done += part.size()) {
      const uint64_t count = std::min<uint64_t>(part.size(), tensor.entry->num_bytes - done);
      tensor.read_part(done, count, part.data());
      for (uint64_t i = 0; i < count; ++i) see(part[i], static_cast<int64_t>(done + i));
    }
  }

  void warn(const LocatedTensor& tensor, std::string evidence, std::string advice) {
    findings_.push_back({Severity::kWarning, "scale-band", tensor.entry->name, std::move(evidence), std::move(advice)});
  }

  void judge(const StoredTensor& stored, const ScaleCounts& counts) {
    const double total = static_cast<double>(std::max<int64_t>(counts.total, 1));
    const auto share = [&](int64_t number) { return static_cast<double>(number) / total; };
    if (share(counts.zero) > kManyZero) {
      warn(stored.block_scales, fmt::format("{:.0f} % of its block scales are zero", 100 * share(counts.zero)),
           "these blocks are lost: the tensor scale is too large, or the layer is pruned");
    }
    if (counts.total < kLeastBlocks || share(counts.top) <= kManyTop) return;
    if (is_clipped(stored, counts)) {
      warn(stored.block_scales,
           fmt::format(
               "{:.0f} % of its block scales are at the largest value, 448, and the codes of these blocks at +-6 "
               "far more often than elsewhere",
               100 * share(counts.top)),
           "large blocks are clipped: the tensor scale is too small, convert this tensor again");
    } else if (share(counts.top) > kManyTop + kSpike * share(counts.below_top)) {
      warn(stored.block_scales,
           fmt::format(
               "{:.0f} % of its block scales are 448, only {:.1f} % the next smaller value, 416, and their codes "
               "are not clipped",
               100 * share(counts.top), 100 * share(counts.below_top)),
           "no quantiser makes that: scales were overwritten; take the tensor from the original");
    }
  }

  // Whether blocks at the top hold the largest code more often than blocks whose scale had room.
  bool is_clipped(const StoredTensor& stored, const ScaleCounts& counts) {
    constexpr uint64_t kCodeBytes = numeric::kNvfp4Block / 2;
    const uint64_t blocks = stored.block_scales.entry->num_bytes;
    if (stored.codes.entry->num_bytes != blocks * kCodeBytes) return false;
    constexpr uint64_t kChunk = kReadBytes / kCodeBytes;
    std::vector<uint8_t> scales(std::min(kChunk, blocks)), codes(scales.size() * kCodeBytes);
    int64_t largest_top = 0, largest_other = 0;
    for (uint64_t done = 0; done < blocks; done += scales.size()) {
      const uint64_t count = std::min<uint64_t>(scales.size(), blocks - done);
      stored.block_scales.read_part(done, count, scales.data());
      stored.codes.read_part(done * kCodeBytes, count * kCodeBytes, codes.data());
      for (uint64_t b = 0; b < count; ++b) {
        int64_t& largest = scales[b] == kTop ? largest_top : largest_other;
        for (uint64_t i = 0; i < kCodeBytes; ++i) {
          const uint8_t pair = codes[b * kCodeBytes + i];
          largest += (pair & 7) == 7, largest += (pair >> 4 & 7) == 7;
        }
      }
    }
    const int64_t others = counts.total - counts.top;
    const double usual =
        others < kLeastBlocks ? kUsualLargest : static_cast<double>(largest_other) / static_cast<double>(others);
    return static_cast<double>(largest_top) / static_cast<double>(counts.top) > kClippedRatio * usual + kClippedMore;
  }

  void bad(const LocatedTensor& tensor, int64_t index, const char* expected, uint8_t byte) {
    if (num_bad_++ > 0) return;
    findings_.push_back(
        {Severity::kFault, "not-finite", tensor.entry->name,
         fmt::format("{}: element {}: expected {}, found byte 0x{:02x}", tensor.file->path(), index, expected, byte),
         "download or convert this tensor again"});
  }

  void numbers(const LocatedTensor& tensor, float least) {
    const int64_t count = tensor.entry->shape.num_elements();
    std::vector<char> raw(tensor.entry->num_bytes);
    tensor.read(raw.data());
    for (int64_t i = 0; i < count; ++i) {
      float value = 0;
      if (tensor.entry->dtype == DType::kF32) {
        std::memcpy(&value, raw.data() + 4 * i, 4);
      } else if (tensor.entry->dtype == DType::kBF16) {
        uint16_t bits = 0;
        std::memcpy(&bits, raw.data() + 2 * i, 2);
        value = numeric::bf16_to_float(bits);
      } else {
        return;
      }
      if (std::isfinite(value) && value >= least) continue;
      findings_.push_back({Severity::kFault, "not-finite", tensor.entry->name,
                           fmt::format("{}: element {}: expected a finite scale {}, found {}", tensor.file->path(), i,
                                       least > 0 ? "> 0" : ">= 0", value),
                           "download or convert this tensor again"});
      return;
    }
  }

  std::vector<Finding>& findings_;
  std::set<std::string> seen_;
  int64_t num_bad_ = 0;
};

// Blocks of MXFP4 that NVFP4 can't hold beside the largest of the matrices that share their scale, w1 and w3 of an
// expert: what loading refuses.
class Mxfp4Checker {
 public:
  Mxfp4Checker(const std::map<std::string, StoredTensor>& stored, std::vector<Finding>& findings)
      : stored_(stored), findings_(findings) {}

  void check(const std::string& name) {
    const StoredTensor& own = stored_.at(name);
    if (own.format != StoredFormat::kMxfp4) return;
    const StoredTensor* matrices[] = {&own, nullptr};
    size_t count = 1;
    if (name.ends_with(".w1") || name.ends_with(".w3")) {
      const bool is_up = name.back() == '3';
      const auto other = stored_.find(name.substr(0, name.size() - 1) + (is_up ? "1" : "3"));
      const bool is_shared = other != stored_.end() && other->second.format == StoredFormat::kMxfp4;
      if (is_shared && is_up) return;  // found with w1
      if (is_shared) matrices[count++] = &other->second;
    }
    model::Mxfp4Scaling scaling;
    try {
      scaling = model::mxfp4_scaling(std::span(matrices).first(count));
    } catch (const Error&) {
      return;  // a NaN scale, which is reported by itself
    }
    if (scaling.num_unrepresentable == 0) return;
    findings_.push_back(
        {Severity::kFault, "scale-range", own.block_scales.entry->name,
         fmt::format("{} of {} MXFP4 blocks{} lie more than 2^17 below the largest: NVFP4 can't hold them, and this "
                     "model is refused",
                     scaling.num_unrepresentable, scaling.num_blocks, count == 2 ? " of w1 and w3" : ""),
         "no trained matrix spans that: compare its E8M0 scales with the original (--allow-inexact rounds the "
         "blocks)"});
  }

 private:
  const std::map<std::string, StoredTensor>& stored_;
  std::vector<Finding>& findings_;
};

}  // namespace

std::vector<Finding> check_scales(const StructureReport& structure, ProgressSink* progress) {
  std::vector<Finding> findings;
  if (!structure.can_run) return findings;
  const Checkpoint& checkpoint = *structure.checkpoint;
  const model::Config& config = *structure.config;
  const std::vector<WeightRow> rows = model::make_weight_spec(config, model::num_draft_layers(checkpoint, config));
  std::set<std::string> used;
  std::map<std::string, StoredTensor> stored;
  for (const WeightRow& row : rows) stored.emplace(row.name, model::resolve_weight(checkpoint, config, row, used));
  ScaleChecker checker(findings);
  Mxfp4Checker mxfp4(stored, findings);
  if (progress != nullptr) progress->begin("check scales", rows.size(), "tensors");
  for (const WeightRow& row : rows) {
    const StoredTensor& tensor = stored.at(row.name);
    if (tensor.block_scales.entry != nullptr) checker.block_scales(tensor);
    if (tensor.tensor_scale.entry != nullptr) checker.tensor_scale(tensor.tensor_scale);
    mxfp4.check(row.name);
    if (progress != nullptr) progress->advance(1);
  }
  if (progress != nullptr) progress->end();
  return findings;
}

}  // namespace tessera::doctor
