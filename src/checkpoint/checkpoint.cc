// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "base/error.h"
#include "base/strings.h"
#include "checkpoint/shard_index.h"

namespace tessera::checkpoint {

namespace {

constexpr const char* kSingleName = "model.safetensors";
constexpr uint64_t kMaxIndexBytes = 256'000'000;

std::string join(const std::string& directory, const std::string& name) {
  return (std::filesystem::path(directory) / name).string();
}

std::vector<std::string> safetensors_in(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& item : std::filesystem::directory_iterator(directory, error)) {
    const std::string name = item.path().filename().string();
    if (name.ends_with(".safetensors")) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

using WeightMap = std::vector<std::pair<std::string, std::string>>;

// The index must name exactly what the shards hold, each in the shard that it says.
void check_index(const WeightMap& index, const std::vector<LocatedTensor>& tensors, const std::string& where) {
  size_t i = 0;
  for (const LocatedTensor& tensor : tensors) {
    if (i >= index.size() || index[i].first > tensor.entry->name) {
      fail_data(tensor.file->path(), fmt::format("tensor {}", printable(tensor.entry->name)),
                "to be named by the index", "no such name in it");
    }
    if (index[i].first < tensor.entry->name) break;
    const std::string file = std::filesystem::path(tensor.file->path()).filename().string();
    if (index[i].second != file) {
      fail_data(where, fmt::format("weight_map: tensor {}", printable(tensor.entry->name)), file, index[i].second);
    }
    ++i;
  }
  if (i < index.size()) {
    fail_data(where, fmt::format("weight_map: tensor {}", printable(index[i].first)),
              fmt::format("to be in {}", printable(index[i].second)), "no such tensor there");
  }
}

}  // namespace

Checkpoint Checkpoint::open(const std::string& directory) {
  Checkpoint checkpoint;
  checkpoint.directory_ = directory;
  if (!folder_exists(directory)) {
    fail(ErrorCode::kNotFound, fmt::format("{}: no such folder; a checkpoint is a folder with config.json and {}",
                                           printable(directory), kSingleName));
  }
  const std::string index_path = join(directory, kIndexName);
  WeightMap index;
  std::vector<std::string> names;
  const bool has_index = file_exists(index_path);
  if (has_index) {
    index = parse_shard_index(read_file(index_path, kMaxIndexBytes), index_path);
    std::set<std::string> unique;
    for (const auto& [tensor, file] : index) unique.insert(file);
    names.assign(unique.begin(), unique.end());
  } else if (file_exists(join(directory, kSingleName))) {
    names = {kSingleName};
  } else {
    names = safetensors_in(directory);
  }
  if (names.empty()) {
    fail(ErrorCode::kNotFound, fmt::format("{}: found neither {} nor {} nor another *.safetensors file",
                                           printable(directory), kSingleName, kIndexName));
  }
  checkpoint.files_.reserve(names.size());
  for (const std::string& name : names) checkpoint.files_.push_back(SafetensorsFile::open(join(directory, name)));
  for (const SafetensorsFile& file : checkpoint.files_) {
    for (const TensorEntry& entry : file.entries()) checkpoint.tensors_.push_back({&entry, &file});
  }
  std::sort(checkpoint.tensors_.begin(), checkpoint.tensors_.end(),
            [](const LocatedTensor& a, const LocatedTensor& b) { return a.entry->name < b.entry->name; });
  for (size_t i = 1; i < checkpoint.tensors_.size(); ++i) {
    const LocatedTensor &a = checkpoint.tensors_[i - 1], &b = checkpoint.tensors_[i];
    if (a.entry->name == b.entry->name) {
      fail_data(b.file->path(), fmt::format("tensor {}", printable(b.entry->name)), "to be in one file only",
                fmt::format("it in {} too", printable(a.file->path())));
    }
  }
  if (has_index) check_index(index, checkpoint.tensors_, index_path);
  return checkpoint;
}

const LocatedTensor* Checkpoint::find(std::string_view name) const {
  const auto at =
      std::lower_bound(tensors_.begin(), tensors_.end(), name,
                       [](const LocatedTensor& tensor, std::string_view key) { return tensor.entry->name < key; });
  return at != tensors_.end() && at->entry->name == name ? &*at : nullptr;
}

}  // namespace tessera::checkpoint
