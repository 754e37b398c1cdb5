// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/tensor_hashes.h"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/atomic_file.h"
#include "base/error.h"
#include "base/json.h"
#include "base/strings.h"

namespace tessera::checkpoint {

namespace {

constexpr uint64_t kReadBytes = 4 << 20;
constexpr uint64_t kMaxHashesBytes = 1'000'000'000;
constexpr const char* kAlgorithm = "xxh3-128";
constexpr size_t kHexDigits = 32;

std::string path_in(const std::string& directory) {
  return (std::filesystem::path(directory) / kHashesName).string();
}

// Lower-case digits, or nothing where it is not a hash.
std::optional<std::string> normalised(const std::string& hex) {
  if (hex.size() != kHexDigits) return std::nullopt;
  std::string out;
  for (const char c : hex) {
    const char low = c >= 'A' && c <= 'F' ? static_cast<char>(c - 'A' + 'a') : c;
    if (!((low >= '0' && low <= '9') || (low >= 'a' && low <= 'f'))) return std::nullopt;
    out += low;
  }
  return out;
}

}  // namespace

struct TensorHasher::State {
  XXH3_state_t xxh;
};

TensorHasher::TensorHasher() : state_(std::make_unique<State>()) {
  XXH3_128bits_reset(&state_->xxh);
}
TensorHasher::~TensorHasher() = default;
TensorHasher::TensorHasher(TensorHasher&& other) noexcept = default;
TensorHasher& TensorHasher::operator=(TensorHasher&& other) noexcept = default;

void TensorHasher::update(const void* data, size_t bytes) {
  if (bytes > 0) XXH3_128bits_update(&state_->xxh, data, bytes);
}

std::string TensorHasher::hex() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(&state_->xxh);
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

std::string hash_tensor(const LocatedTensor& tensor, ProgressSink* progress) {
  TensorHasher hasher;
  const uint64_t total = tensor.entry->num_bytes;
  std::vector<char> part(std::min(kReadBytes, total));
  for (uint64_t done = 0; done < total;) {
    const uint64_t bytes = std::min(kReadBytes, total - done);
    tensor.read_part(done, bytes, part.data());
    hasher.update(part.data(), bytes);
    done += bytes;
    if (progress != nullptr) progress->advance(bytes);
  }
  return hasher.hex();
}

std::string format_hashes(TensorHashes hashes) {
  std::sort(hashes.begin(), hashes.end());
  nlohmann::ordered_json tensors = nlohmann::ordered_json::object();
  for (const auto& [name, hex] : hashes) tensors.emplace(name, hex);
  const nlohmann::ordered_json root = {{"algorithm", kAlgorithm}, {"tensors", std::move(tensors)}};
  return root.dump(1) + "\n";
}

TensorHashes parse_hashes(std::string_view text, const std::string& where) {
  const Json root = Json::parse(text, where);
  const JsonCursor cursor(root, where);
  const JsonCursor algorithm = cursor.at("algorithm");
  if (algorithm.string() != kAlgorithm) algorithm.fail_expected(fmt::format("\"{}\"", kAlgorithm));
  TensorHashes hashes;
  for (const auto& [name, value] : cursor.at("tensors").members()) {
    const std::optional<std::string> hex = normalised(value.string());
    if (!hex) value.fail_expected(fmt::format("{} hex digits", kHexDigits));
    hashes.emplace_back(name, *hex);
  }
  std::sort(hashes.begin(), hashes.end());
  return hashes;
}

TensorHashes load_hashes(const std::string& directory) {
  const std::string path = path_in(directory);
  if (!file_exists(path)) return {};
  return parse_hashes(read_file(path, kMaxHashesBytes), path);
}

void write_hashes(const std::string& directory, const TensorHashes& hashes) {
  const std::string text = format_hashes(hashes);
  AtomicFile file(path_in(directory));
  file.write(text.data(), text.size());
  file.commit();
}

}  // namespace tessera::checkpoint
