// SPDX-License-Identifier: Apache-2.0
#include "checkpoint_facts.h"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>

#include "base/file.h"
#include "checkpoint/checkpoint.h"

namespace tessera::app {

namespace {

constexpr uint64_t kMaxConfigBytes = 16 << 20, kMostWhole = 256 << 20;
constexpr uint64_t kNumSamples = 256, kSampleBytes = 64, kPiece = 1 << 20;

class Hash {
 public:
  Hash() { XXH3_64bits_reset(state_.get()); }
  void add(const void* bytes, size_t size) { XXH3_64bits_update(state_.get(), bytes, size); }
  std::string text() const { return fmt::format("{:016x}", XXH3_64bits_digest(state_.get())); }

 private:
  struct Free {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };
  std::unique_ptr<XXH3_state_t, Free> state_{XXH3_createState()};
};

}  // namespace

std::vector<comm::Fact> checkpoint_facts(const std::string& directory) {
  const checkpoint::Checkpoint checkpoint = checkpoint::Checkpoint::open(directory);
  Hash of_config;
  const std::string config = read_file(directory + "/config.json", kMaxConfigBytes);
  of_config.add(config.data(), config.size());
  std::vector<comm::Fact> facts = {{"config.json", of_config.text()}};

  uint64_t all_bytes = 0;
  for (const checkpoint::LocatedTensor& tensor : checkpoint.tensors()) all_bytes += tensor.entry->num_bytes;
  const bool is_whole = all_bytes <= kMostWhole;
  const size_t stride = is_whole ? 1 : checkpoint.tensors().size() / kNumSamples + 1;
  struct OfFile {
    Hash headers, data;
  };
  std::map<std::string, OfFile> files;
  std::vector<char> piece(is_whole ? kPiece : kSampleBytes);
  for (size_t i = 0; i < checkpoint.tensors().size(); ++i) {
    const checkpoint::LocatedTensor& tensor = checkpoint.tensors()[i];
    const checkpoint::TensorEntry& entry = *tensor.entry;
    OfFile& of = files[std::filesystem::path(tensor.file->path()).filename()];
    const std::string header =
        fmt::format("{} {} {} {}\n", entry.name, entry.dtype_text, entry.shape.to_string(), entry.file_offset);
    of.headers.add(header.data(), header.size());
    if (i % stride != 0) continue;
    const uint64_t size = is_whole ? entry.num_bytes : std::min(kSampleBytes, entry.num_bytes);
    const uint64_t begin = (entry.num_bytes - size) / 2;  // of samples the middle
    for (uint64_t at = 0; at < size; at += piece.size()) {
      const uint64_t bytes = std::min<uint64_t>(piece.size(), size - at);
      tensor.read_part(begin + at, bytes, piece.data());
      of.data.add(piece.data(), bytes);
    }
  }
  for (const auto& [file, of] : files) {
    facts.push_back({"the header of " + file, of.headers.text()});
    facts.push_back({(is_whole ? "the weights of " : "samples of the weights of ") + file, of.data.text()});
  }
  return facts;
}

}  // namespace tessera::app
