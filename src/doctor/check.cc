// SPDX-License-Identifier: Apache-2.0
#include "doctor/check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <set>

#include "base/error.h"
#include "base/strings.h"
#include "checkpoint/tensor_hashes.h"
#include "model/draft_names.h"
#include "model/load_model.h"
#include "model/weight_format.h"
#include "model/weight_names.h"
#include "model/weight_spec.h"
#include "numeric/bf16.h"

namespace tessera::doctor {

namespace {

using checkpoint::Checkpoint;
using checkpoint::LocatedTensor;
using model::Config;
using model::WeightRow;

constexpr size_t kMaxStructureFindings = 20;
constexpr double kMuch = 0.05;  // share of block scales that may be zero or at the top
constexpr uint64_t kReadBytes = 4 << 20;

// The config says which layers compress and how; a compressor's position bias [ratio, width] says it too. Corrects
// `config` by it, so that one wrong number is not told as many misshapen tensors.
void check_ratios(const Checkpoint& checkpoint, Config& config, std::vector<Finding>& findings) {
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const std::string name = fmt::format("layers.{}.attn.compressor.ape", layer);
    const LocatedTensor* ape = checkpoint.find(name);
    for (const std::string& other : model::hf_names(name)) {
      if (ape == nullptr) ape = checkpoint.find(other);
    }
    const int64_t stored = ape == nullptr || ape->entry->shape.rank() != 2 ? 0 : ape->entry->shape[0];
    int64_t& ratio = config.compress_ratios[static_cast<size_t>(layer)];
    const int64_t said = ratio;
    if (stored == said || (stored != 0 && stored != 4 && stored != 128)) continue;
    ratio = stored;
    findings.push_back(
        {Severity::kFault, "config", fmt::format("config.json: compress_ratios[{}]", layer),
         fmt::format("it says {}, the tensors of the layer are those of ratio {} ({})", said, stored,
                     ape == nullptr ? "no compressor" : ape->entry->name + " " + ape->entry->shape.to_string()),
         fmt::format("set it to {}", stored)});
  }
}

// Tensors that the table did not ask for and that are not known to be left aside.
void check_unknown(const Checkpoint& checkpoint, const Config& config, const std::set<std::string>& used,
                   std::vector<Finding>& findings) {
  const model::DraftNames draft_names(config);
  std::vector<std::string> unknown;
  for (const LocatedTensor& tensor : checkpoint.tensors()) {
    const std::string& name = tensor.entry->name;
    if (used.contains(name) || draft_names.has(name) || name.ends_with(".input_scale") ||
        name.ends_with(".input_global_scale")) {
      continue;
    }
    unknown.push_back(name);
  }
  if (unknown.empty()) return;
  const std::string beyond = fmt::format("layers.{}.", config.num_layers);
  const auto extra = std::find_if(unknown.begin(), unknown.end(), [&](const std::string& name) {
    return name.starts_with(beyond) || name.starts_with("model." + beyond);
  });
  if (extra != unknown.end()) {
    findings.push_back({Severity::kFault, "config", "config.json: num_hidden_layers",
                        fmt::format("it says {}, the checkpoint goes on with {}", config.num_layers, printable(*extra)),
                        "set it to the number of layers that the tensors have"});
    return;
  }
  findings.push_back({Severity::kWarning, "unknown-tensor", printable(unknown.front()),
                      fmt::format("{} tensors are not part of this model as config.json describes it", unknown.size()),
                      "check config.json; harmless where they belong to an extension"});
}

}  // namespace

StructureReport check_structure(const std::string& directory) {
  StructureReport report;
  std::error_code error;
  if (!std::filesystem::is_directory(directory, error)) {
    fail(ErrorCode::kNotFound, fmt::format("{}: no such folder", printable(directory)));
  }
  const auto fault = [&](std::string kind, std::string where, std::string evidence, std::string advice) {
    report.findings.push_back(
        {Severity::kFault, std::move(kind), std::move(where), std::move(evidence), std::move(advice)});
  };
  try {
    report.config = model::load_config(directory);
  } catch (const Error& failure) {
    fault("config", "config.json", failure.what(), "take config.json from the release that the weights come from");
  }
  try {
    report.checkpoint = std::make_unique<Checkpoint>(Checkpoint::open(directory));
  } catch (const Error& failure) {
    fault("damaged-file", directory, failure.what(),
          "the download or copy is incomplete or damaged: fetch this file again");
  }
  if (!report.config || report.checkpoint == nullptr) return report;
  Config config = *report.config;
  check_ratios(*report.checkpoint, config, report.findings);
  std::set<std::string> used;
  size_t num_missing = 0;
  for (const WeightRow& row : model::make_weight_spec(config, model::num_draft_layers(*report.checkpoint, config))) {
    try {
      model::resolve_weight(*report.checkpoint, config, row, used);
    } catch (const Error& failure) {
      if (num_missing++ >= kMaxStructureFindings) continue;
      fault("structure", row.name, failure.what(), "the checkpoint is incomplete, or config.json is of another model");
    }
  }
  check_unknown(*report.checkpoint, config, used, report.findings);
  report.can_run = num_missing == 0 && !has_fault(report.findings);
  return report;
}

namespace {

struct ScaleCounts {
  int64_t total = 0, zero = 0, top = 0;
};

class ScaleChecker {
 public:
  explicit ScaleChecker(std::vector<Finding>& findings) : findings_(findings) {}

  void block_scales(const LocatedTensor& tensor) {
    const auto dtype = tensor.entry->dtype;
    if (dtype == DType::kF8E4M3) {
      bytes(tensor, [&](uint8_t byte, int64_t i, ScaleCounts& counts) {
        counts.zero += byte == 0, counts.top += byte == 0x7E;
        if (byte > 0x7E) bad(tensor, i, "a positive E4M3 scale (0x00 to 0x7e)", byte);
      });
    } else if (dtype == DType::kF8E8M0 || dtype == DType::kU8) {
      bytes(tensor, [&](uint8_t byte, int64_t i, ScaleCounts&) {
        if (byte == 0xFF) bad(tensor, i, "an E8M0 scale (0x00 to 0xfe)", byte);
      });
    } else {
      numbers(tensor, 0);
    }
  }

  void tensor_scale(const LocatedTensor& tensor) { numbers(tensor, std::numeric_limits<float>::denorm_min()); }

 private:
  template <class See>
  void bytes(const LocatedTensor& tensor, See see) {
    ScaleCounts counts;
    num_bad_ = 0;
    std::vector<uint8_t> part(std::min(kReadBytes, tensor.entry->num_bytes));
    for (uint64_t done = 0; done < tensor.entry->num_bytes; done += part.size()) {
      const uint64_t count = std::min<uint64_t>(part.size(), tensor.entry->num_bytes - done);
      tensor.read_part(done, count, part.data());
      for (uint64_t i = 0; i < count; ++i) see(part[i], static_cast<int64_t>(done + i), counts);
      counts.total += static_cast<int64_t>(count);
    }
    const double total = static_cast<double>(std::max<int64_t>(counts.total, 1));
    const auto many = [&](int64_t number, const char* what, const char* advice) {
      if (static_cast<double>(number) <= kMuch * total) return;
      findings_.push_back(
          {Severity::kWarning, "scale-band", tensor.entry->name,
           fmt::format("{:.0f} % of its block scales are {}", 100 * static_cast<double>(number) / total, what),
           advice});
    };
    many(counts.zero, "zero", "these blocks are lost: the tensor scale is too large, or the layer is pruned");
    many(counts.top, "at the largest value, 448", "the tensor scale is too small: large blocks are clipped");
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
  int64_t num_bad_ = 0;
};

uint64_t total_bytes(const Checkpoint& checkpoint) {
  uint64_t total = 0;
  for (const LocatedTensor& tensor : checkpoint.tensors()) total += tensor.entry->num_bytes;
  return total;
}

}  // namespace

std::vector<Finding> check_scales(const StructureReport& structure, ProgressSink* progress) {
  std::vector<Finding> findings;
  if (!structure.can_run) return findings;
  const Checkpoint& checkpoint = *structure.checkpoint;
  const Config& config = *structure.config;
  const std::vector<WeightRow> rows = model::make_weight_spec(config, model::num_draft_layers(checkpoint, config));
  ScaleChecker checker(findings);
  std::set<std::string> used;
  if (progress != nullptr) progress->begin("check scales", rows.size(), "tensors");
  for (const WeightRow& row : rows) {
    const model::StoredTensor stored = model::resolve_weight(checkpoint, config, row, used);
    if (stored.block_scales.entry != nullptr) checker.block_scales(stored.block_scales);
    if (stored.tensor_scale.entry != nullptr) checker.tensor_scale(stored.tensor_scale);
    if (progress != nullptr) progress->advance(1);
  }
  if (progress != nullptr) progress->end();
  return findings;
}

std::vector<Finding> check_hashes(const Checkpoint& checkpoint, ProgressSink* progress, size_t* num_checked) {
  std::vector<Finding> findings;
  checkpoint::TensorHashes expected;
  try {
    expected = checkpoint::load_hashes(checkpoint.directory());
  } catch (const Error& failure) {
    findings.push_back({Severity::kFault, "hash", checkpoint::kHashesName, failure.what(), "fetch hashes.json again"});
    return findings;
  }
  if (num_checked != nullptr) *num_checked = 0;
  if (expected.empty()) return findings;
  if (progress != nullptr) progress->begin("check hashes", total_bytes(checkpoint), "B");
  auto next = expected.begin();
  for (const LocatedTensor& tensor : checkpoint.tensors()) {
    const std::string& name = tensor.entry->name;
    for (; next != expected.end() && next->first < name; ++next) {
      findings.push_back({Severity::kFault, "hash", printable(next->first),
                          "hashes.json names it, the checkpoint does not hold it", "fetch the missing shard"});
    }
    if (next == expected.end() || next->first != name) {
      findings.push_back({Severity::kWarning, "hash", printable(name), "hashes.json does not name it",
                          "write hashes.json again where the tensor is meant to be there"});
      continue;
    }
    const std::string found = checkpoint::hash_tensor(tensor, progress);
    if (found != next->second) {
      findings.push_back({Severity::kFault, "hash", printable(name),
                          fmt::format("{}: expected hash {}, found {}", tensor.file->path(), next->second, found),
                          "its bytes changed since hashes.json was written: fetch this shard again"});
    }
    if (num_checked != nullptr) ++*num_checked;
    ++next;
  }
  for (; next != expected.end(); ++next) {
    findings.push_back({Severity::kFault, "hash", printable(next->first),
                        "hashes.json names it, the checkpoint does not hold it", "fetch the missing shard"});
  }
  if (progress != nullptr) progress->end();
  return findings;
}

void write_hashes_of(const Checkpoint& checkpoint, ProgressSink* progress) {
  checkpoint::TensorHashes hashes;
  if (progress != nullptr) progress->begin("hash", total_bytes(checkpoint), "B");
  for (const LocatedTensor& tensor : checkpoint.tensors()) {
    hashes.emplace_back(tensor.entry->name, checkpoint::hash_tensor(tensor, progress));
  }
  if (progress != nullptr) progress->end();
  checkpoint::write_hashes(checkpoint.directory(), hashes);
}

}  // namespace tessera::doctor
