// SPDX-License-Identifier: Apache-2.0
#include "doctor/check.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <set>

#include "base/error.h"
#include "base/file.h"
#include "base/strings.h"
#include "checkpoint/tensor_hashes.h"
#include "model/draft_names.h"
#include "model/load_model.h"
#include "model/weight_format.h"
#include "model/weight_names.h"
#include "model/weight_spec.h"

namespace tessera::doctor {

namespace {

using checkpoint::Checkpoint;
using checkpoint::LocatedTensor;
using model::Config;
using model::WeightRow;

constexpr size_t kMaxStructureFindings = 20;

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
  if (!folder_exists(directory)) {
    fail(ErrorCode::kNotFound, fmt::format("{}: no such folder", printable(directory)));
  }
  const auto fault = [&](std::string kind, std::string where, std::string evidence, std::string advice) {
    report.findings.push_back(
        {Severity::kFault, std::move(kind), std::move(where), std::move(evidence), std::move(advice)});
  };
  // Nothing is wrong with a file that this user may not read, as far as anyone knows.
  for (const auto& file : std::filesystem::directory_iterator(directory, error)) {
    const std::string path = file.path().string(), ending = file.path().extension().string();
    if (ending != ".json" && ending != ".safetensors") continue;
    if (::access(path.c_str(), R_OK) == 0 || errno != EACCES) continue;
    fault("no-permission", printable(path), "this user may not read it", "change its owner or its mode (chmod u+r)");
  }
  if (has_fault(report.findings)) return report;
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

uint64_t total_bytes(const Checkpoint& checkpoint) {
  uint64_t total = 0;
  for (const LocatedTensor& tensor : checkpoint.tensors()) total += tensor.entry->num_bytes;
  return total;
}

}  // namespace

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
