// SPDX-License-Identifier: Apache-2.0
#include "convert/work_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json.h"
#include "base/strings.h"
#include "convert/statistics_json.h"
#include "convert/write_whole.h"

namespace tessera::convert {

namespace fs = std::filesystem;

namespace {

constexpr uint64_t kMaxRecordBytes = 256'000'000;
constexpr const char* kBegunName = "conversion.json";

[[noreturn]] void fail_out(const std::string& out, const std::string& what) {
  fail(ErrorCode::kInvalidArgument, fmt::format("{}: {}", printable(out), what));
}

[[noreturn]] void fail_to_create(const std::string& path, int error) {
  const bool is_full = error == ENOSPC || error == EDQUOT;
  fail(is_full ? ErrorCode::kResourceExhausted : ErrorCode::kInvalidArgument,
       fmt::format("{}: cannot create: {}", printable(path), std::strerror(error)));
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& item : fs::directory_iterator(folder, error)) names.push_back(item.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

// Files that make a folder a checkpoint, or describe one. config.json first: without it nothing loads the rest.
bool is_checkpoint_file(const std::string& name) {
  return name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json") ||
         name == checkpoint::kHashesName || name == "hf_quant_config.json" || name.starts_with("conversion_report.");
}

void remove_unfinished_files(const std::string& folder) {
  std::error_code ignored;
  for (const std::string& name : names_in(folder)) {
    if (name.find(".tmp-") != std::string::npos) fs::remove(fs::path(folder) / name, ignored);
  }
}

}  // namespace

WorkFolder::WorkFolder(std::string out, Existing existing, const std::string& fingerprint)
    : out_(std::move(out)), path_((fs::path(out_) / kWorkFolderName).string()) {
  if (out_.empty()) fail_out("OUT", "expected the name of a folder, found an empty one");
  std::error_code error;
  if (fs::exists(out_, error) && !fs::is_directory(out_, error)) fail_out(out_, "expected a folder, found a file");
  has_made_out_ = !fs::exists(out_, error);
  const std::vector<std::string> names = names_in(out_);
  const bool has_begun = fs::exists(path_, error);
  if (has_begun && existing == Existing::kRefuse) {
    fail_out(out_, "holds an unfinished conversion; resume it (--resume) or begin anew (--force)");
  }
  if (!names.empty() && !has_begun && existing != Existing::kReplace) {
    fail_out(out_, fmt::format("expected an empty folder, found {}; name another one, or replace the checkpoint in it "
                               "(--force)",
                               printable(names.front())));
  }
  fs::create_directories(path_, error);
  if (error) fail_to_create(path_, error.value());
  const std::string lock_path = (fs::path(path_) / "lock").string();
  lock_ = ::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (lock_ < 0) fail_to_create(lock_path, errno);
  // A file system without locks is no reason to refuse.
  if (::flock(lock_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    ::close(lock_);
    fail_out(out_, "another conversion is writing here");
  }
  try {
    prepare(existing, fingerprint);
  } catch (...) {
    clean_up();
    throw;
  }
}

void WorkFolder::prepare(Existing existing, const std::string& fingerprint) {
  std::error_code ignored;
  const std::string begun_path = (fs::path(path_) / kBegunName).string();
  replaces_ = existing == Existing::kReplace;
  if (replaces_) {
    for (const std::string& name : names_in(path_)) {
      if (name != "lock") fs::remove_all(fs::path(path_) / name, ignored);
    }
  } else if (file_exists(begun_path)) {
    const Json json = Json::parse(read_file(begun_path, kMaxRecordBytes), begun_path);
    const JsonCursor begun(json, begun_path);
    if (begun.at("fingerprint").string() != fingerprint) {
      fail_out(out_, "was begun with another source, other options or another version; begin anew (--force)");
    }
    replaces_ = begun.at("replaces").boolean();
    remove_unfinished_files(path_);
    remove_unfinished_files(out_);
    return;
  }
  write_whole(begun_path, nlohmann::json{{"fingerprint", fingerprint}, {"replaces", replaces_}}.dump() + "\n");
}

WorkFolder::~WorkFolder() {
  clean_up();
}

void WorkFolder::clean_up() noexcept {
  if (!is_removed_) {
    std::error_code ignored;
    bool has_record = false;
    for (const std::string& name : names_in(path_)) has_record |= name.ends_with(".safetensors.json");
    if (!has_record) {
      fs::remove_all(path_, ignored);
      if (has_made_out_) fs::remove(out_, ignored);  // only where it is empty
    }
  }
  ::close(lock_);
}

std::string WorkFolder::shard_path(const PlannedShard& shard) const {
  return (fs::path(path_) / shard.file).string();
}

std::optional<FinishedShard> WorkFolder::finished(const PlannedShard& shard) const {
  const std::string record_path = shard_path(shard) + ".json";
  const std::string published = (fs::path(out_) / shard.file).string();
  const bool is_published = !file_exists(shard_path(shard)) && file_exists(published);
  try {
    if (!file_exists(record_path)) return std::nullopt;
    // Opening checks that header and size agree.
    checkpoint::SafetensorsFile::open(is_published ? published : shard_path(shard));
    const Json json = Json::parse(read_file(record_path, kMaxRecordBytes), record_path);
    const JsonCursor cursor(json, record_path);
    FinishedShard out;
    const auto families = cursor.at("families").elements();
    if (families.size() != kNumFamilies) return std::nullopt;
    for (size_t f = 0; f < kNumFamilies; ++f) out.statistics[f] = statistics_from_json(families[f]);
    for (const auto& [name, hash] : cursor.at("hashes").members()) out.hashes.emplace_back(name, hash.string());
    return out;
  } catch (const Error&) {
    return std::nullopt;  // whatever is wrong with it, it can be made again
  }
}

void WorkFolder::record(const PlannedShard& shard, const FinishedShard& finished) const {
  nlohmann::ordered_json json = {{"families", nlohmann::ordered_json::array()}};
  for (const Statistics& statistics : finished.statistics) json["families"].push_back(to_json(statistics));
  nlohmann::json hashes = nlohmann::json::object();
  for (const auto& [name, hash] : finished.hashes) hashes[name] = hash;
  json["hashes"] = std::move(hashes);
  write_whole(shard_path(shard) + ".json", json.dump() + "\n");
}

void WorkFolder::remove_replaced(const std::vector<PlannedShard>& shards) const {
  const auto is_new = [&](const std::string& name) {
    return std::any_of(shards.begin(), shards.end(), [&](const PlannedShard& shard) {
      return shard.file == name && !file_exists(shard_path(shard));  // moved before an interruption
    });
  };
  const auto remove = [&](const std::string& name) {
    std::error_code error;
    fs::remove(fs::path(out_) / name, error);
    if (error) fail_out((fs::path(out_) / name).string(), fmt::format("cannot remove: {}", error.message()));
  };
  remove("config.json");
  for (const std::string& name : names_in(out_)) {
    if (is_checkpoint_file(name) && !is_new(name)) remove(name);
  }
}

void WorkFolder::publish(const std::vector<PlannedShard>& shards) const {
  if (replaces_) remove_replaced(shards);
  for (const PlannedShard& shard : shards) {
    if (!file_exists(shard_path(shard))) continue;  // moved before an interruption
    std::error_code error;
    fs::rename(shard_path(shard), fs::path(out_) / shard.file, error);
    if (error) fail(ErrorCode::kResourceExhausted, fmt::format("{}: cannot rename: {}", shard.file, error.message()));
  }
}

void WorkFolder::remove() {
  std::error_code error;
  fs::remove_all(path_, error);
  if (error) fail_out(path_, fmt::format("cannot remove: {}", error.message()));
  is_removed_ = true;
}

}  // namespace tessera::convert
