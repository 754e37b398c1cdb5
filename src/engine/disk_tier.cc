// SPDX-License-Identifier: Apache-2.0
#include "engine/disk_tier.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <openssl/sha.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/strings.h"
#include "base/test_seams.h"
#include "engine/disk_index.h"

namespace tessera::engine {

namespace fs = std::filesystem;

namespace {

constexpr const char* kIndexName = "index.sqlite";
constexpr std::string_view kSuffix = ".snap", kTemporary = ".tmp-";
constexpr size_t kNameDigits = 16;
constexpr double kReportSeconds = 60;  // between lines about faults

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

PrefixDigest sha256(const void* first, size_t first_bytes, const void* then, size_t then_bytes) {
  std::vector<uint8_t> bytes(first_bytes + then_bytes);
  std::memcpy(bytes.data(), first, first_bytes);
  if (then_bytes > 0) std::memcpy(bytes.data() + first_bytes, then, then_bytes);
  PrefixDigest digest;
  SHA256(bytes.data(), bytes.size(), digest.data());
  return digest;
}

// A file of the tier, or one that was to become one.
bool is_ours(std::string_view name) {
  const size_t digits = name.find_first_not_of("0123456789abcdef");
  if (digits != kNameDigits || !name.substr(digits).starts_with(kSuffix)) return false;
  const std::string_view rest = name.substr(digits + kSuffix.size());
  return rest.empty() || rest.starts_with(kTemporary);
}

[[noreturn]] void fail_folder(const std::string& folder, const std::string& what) {
  fail(ErrorCode::kInvalidArgument, fmt::format("{}: {}", printable(folder), what));
}

// The folder, made where it is not there. Others must not be able to put files into it, and are kept from looking.
void check_folder(const std::string& folder) {
  if (folder.empty()) fail_folder(folder, "expected the name of a folder, found an empty one");
  std::error_code error;
  const fs::path parent = fs::absolute(folder, error).parent_path();
  if (!parent.empty()) fs::create_directories(parent, error);
  const bool seam_fails = seams::is_failing_file_call();
  if (seam_fails) errno = EIO;
  if ((seam_fails || ::mkdir(folder.c_str(), 0700) != 0) && errno != EEXIST) {
    fail_folder(folder, fmt::format("cannot create the folder: {}", std::strerror(errno)));
  }
  struct stat info {};
  if (::stat(folder.c_str(), &info) != 0) fail_folder(folder, fmt::format("cannot stat: {}", std::strerror(errno)));
  if (!S_ISDIR(info.st_mode)) fail_folder(folder, "expected a folder, found something else");
  if (info.st_uid != ::geteuid() || (info.st_mode & 022) != 0) {
    fail_folder(folder, fmt::format("expected a folder that this user owns and nobody else may write to, found owner "
                                    "{} and mode {:o}",
                                    info.st_uid, info.st_mode & 0777));
  }
  if ((info.st_mode & 077) != 0 && ::chmod(folder.c_str(), 0700) != 0) {
    fail_folder(folder, fmt::format("cannot keep others from reading it: {}", std::strerror(errno)));
  }
  if (::access(folder.c_str(), W_OK | X_OK) != 0) {
    fail_folder(folder, fmt::format("cannot write to it: {}", std::strerror(errno)));
  }
}

// What can't be found out counts as room: the write will tell.
int64_t free_bytes_of(const std::string& folder) {
  struct statvfs info {};
  if (::statvfs(folder.c_str(), &info) != 0) return std::numeric_limits<int64_t>::max();
  return static_cast<int64_t>(std::min<uint64_t>(uint64_t{info.f_bavail} * info.f_frsize, uint64_t{1} << 62));
}

// mkdir and parent_path() are of the folder itself.
DiskTierOptions without_slash(DiskTierOptions options) {
  while (options.folder.size() > 1 && options.folder.back() == '/') options.folder.pop_back();
  return options;
}

}  // namespace

DiskTier::DiskTier(DiskTierOptions options) : options_(without_slash(std::move(options))) {
  constexpr std::string_view kScheme = "tessera disk tier 1\n";
  identity_ = sha256(kScheme.data(), kScheme.size(), options_.identity.data(), options_.identity.size());
  try {
    check_folder(options_.folder);
    take_lock();
    open();
    thread_ = std::thread([this] { work(); });
    is_on_ = true;
  } catch (const std::exception& error) {
    report(fmt::format("{}; no disk is used", error.what()));
    files_.reset();
    if (lock_file_ >= 0) ::close(std::exchange(lock_file_, -1));
  }
}

DiskTier::~DiskTier() {
  if (!is_on_) return;
  {
    std::unique_lock<std::mutex> hold(lock_);
    const auto most = std::chrono::duration<double>(options_.ending_seconds);
    idle_.wait_for(hold, most, [&] { return waiting_.empty() && removed_.empty() && !is_working_; });
    is_ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
  files_.reset();
  ::close(lock_file_);
}

void DiskTier::take_lock() {
  const std::string path = options_.folder + "/lock";
  lock_file_ =
      seams::is_failing_file_call() ? -1 : ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (lock_file_ < 0) fail_folder(path, fmt::format("cannot open: {}", std::strerror(errno)));
  if (::flock(lock_file_, LOCK_EX | LOCK_NB) != 0) {
    fail_folder(options_.folder, errno == EWOULDBLOCK ? "another server uses this cache folder"
                                                      : fmt::format("cannot lock: {}", std::strerror(errno)));
  }
}

void DiskTier::open() {
  const std::string path = options_.folder + "/" + kIndexName;
  std::vector<TierItem> items;
  try {
    files_ = std::make_unique<DiskIndex>(path);
    items = files_->read();
  } catch (const Error& error) {
    files_.reset();
    const bool is_bad = error.code() == ErrorCode::kDataLoss || error.code() == ErrorCode::kUnsupported;
    if (!is_bad || !DiskIndex::is_ours(path)) throw;
    report(fmt::format("{}; the cache begins anew", error.what()));
    for (const char* suffix : {"", "-wal", "-shm", "-journal"}) ::unlink((path + suffix).c_str());
    files_ = std::make_unique<DiskIndex>(path);
    items = files_->read();
  }
  sweep(items);
  const std::lock_guard<std::mutex> hold(lock_);
  for (TierItem& item : items) {
    const bool is_twice = item.is_segment && index_.segment(item.digest) != index_.end();
    if (is_twice || !file_exists(path_of(item.id))) {
      files_->remove(item.id);
      continue;
    }
    index_.add(std::move(item));
  }
  evict();
}

// Files of lives that ended in the middle of something: temporaries, and what the index does not know.
void DiskTier::sweep(const std::vector<TierItem>& kept) {
  std::set<std::string> names;
  for (const TierItem& item : kept) names.insert(fs::path(path_of(item.id)).filename().string());
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(options_.folder, error)) {
    const std::string name = entry.path().filename().string();
    if (is_ours(name) && !names.contains(name)) ::unlink(entry.path().c_str());
  }
  if (error) fail_folder(options_.folder, fmt::format("cannot list: {}", error.message()));
}

std::string DiskTier::path_of(int64_t id) const {
  return fmt::format("{}/{:016x}{}", options_.folder, id, kSuffix);
}

// Nothing of another identity has this digest, and whole blocks tell only who has the model and the text; a state's
// tail of up to a block lies beside it as it is.
PrefixDigest DiskTier::masked(const PrefixDigest& digest) const {
  return sha256(identity_.data(), identity_.size(), digest.data(), digest.size());
}

std::vector<PrefixDigest> DiskTier::masked(std::span<const PrefixDigest> digests) const {
  std::vector<PrefixDigest> out;
  out.reserve(digests.size());
  for (const PrefixDigest& digest : digests) out.push_back(masked(digest));
  return out;
}

int64_t DiskTier::longest(const PrefixText& text, int64_t most) {
  if (!is_on_) return 0;
  const std::vector<PrefixDigest> digests = masked(text.digests);
  const std::lock_guard<std::mutex> hold(lock_);
  return index_.longest({digests, text.ids}, most);
}

bool DiskTier::has_state(const PrefixKey& key) {
  const PrefixDigest digest = masked(key.digests.back());
  const std::lock_guard<std::mutex> hold(lock_);
  return index_.state({{&digest, 1}, key.tail}) != index_.end();
}

bool DiskTier::has_segment(const PrefixDigest& digest) {
  const PrefixDigest mine = masked(digest);
  const std::lock_guard<std::mutex> hold(lock_);
  return index_.segment(mine) != index_.end();
}

bool DiskTier::has_room(int64_t bytes) {
  const std::lock_guard<std::mutex> hold(lock_);
  if (!is_on_) return false;
  if (bytes <= options_.budget_bytes && waiting_bytes_ + bytes <= options_.queue_bytes) return true;
  ++stats_.num_dropped;
  return false;
}

std::optional<SnapshotBytes> DiskTier::load(const PrefixKey& key) {
  if (!is_on_) return std::nullopt;
  const std::vector<PrefixDigest> digests = masked(key.digests);
  std::vector<TierItem> items;  // the state, then its segments
  {
    const std::lock_guard<std::mutex> hold(lock_);
    const PrefixKey mine{digests, key.tail};
    for (size_t i = 0; i < digests.size(); ++i) {
      const TierIndex::Place place = i == 0 ? index_.state(mine) : index_.segment(digests[i]);
      if (place == index_.end()) return std::nullopt;
      items.push_back(*place);
    }
    use(mine);
  }
  SnapshotBytes out;
  for (TierItem& item : items) {
    if (item.first == nullptr) {
      try {
        TierFile file = read_tier_file(path_of(item.id), item.bytes);
        if (file.identity != identity_ || file.digest != item.digest || file.is_segment != item.is_segment ||
            file.tail != item.tail) {
          fail_data(path_of(item.id), "header", "what the index says", "another one's");
        }
        item.first = std::move(file.first), item.second = std::move(file.second);
      } catch (const Error& error) {
        const std::lock_guard<std::mutex> hold(lock_);
        const TierIndex::Place place = index_.item(item.id);
        if (place == index_.end()) return std::nullopt;  // given up while it was read
        report(fmt::format("{}; it is not used", error.what()));
        remove(place);
        changed_.notify_all();
        return std::nullopt;
      }
    }
    if (item.is_segment) {
      out.segments.push_back(std::move(item.first));
    } else {
      out.state = std::move(item.first), out.tail_pages = std::move(item.second);
    }
  }
  const std::lock_guard<std::mutex> hold(lock_);
  ++stats_.num_hits;
  stats_.num_hit_tokens += key.position();
  return out;
}

void DiskTier::touch(const PrefixKey& key) {
  if (!is_on_) return;
  const std::vector<PrefixDigest> digests = masked(key.digests);
  const std::lock_guard<std::mutex> hold(lock_);
  use({digests, key.tail});
}

void DiskTier::use(const PrefixKey& masked_key) {
  index_.touch(masked_key);
  const auto note = [&](TierIndex::Place place) {
    if (place != index_.end()) uses_[place->id] = place->last_use;
  };
  note(index_.state(masked_key));
  for (const PrefixDigest& digest : masked_key.digests.subspan(1)) note(index_.segment(digest));
}

void DiskTier::put(const PrefixKey& key, SnapshotBytes bytes) {
  if (!is_on_) return;
  const std::vector<PrefixDigest> digests = masked(key.digests);
  {
    const std::lock_guard<std::mutex> hold(lock_);
    for (size_t i = 0; i < bytes.segments.size(); ++i) {
      if (bytes.segments[i] == nullptr || index_.segment(digests[i + 1]) != index_.end()) continue;
      const int64_t size = tier_file_bytes(0, bytes.segments[i]->size(), 0);
      add({.is_segment = true,
           .digest = digests[i + 1],
           .tail = {},
           .bytes = size,
           .first = std::move(bytes.segments[i]),
           .second = std::make_shared<const std::vector<uint8_t>>()});
    }
    const PrefixKey mine{digests, key.tail};
    if (index_.state(mine) == index_.end()) {
      const int64_t size = tier_file_bytes(key.tail.size(), bytes.state->size(), bytes.tail_pages->size());
      add({.digest = digests.back(),
           .tail = {key.tail.begin(), key.tail.end()},
           .bytes = size,
           .first = std::move(bytes.state),
           .second = std::move(bytes.tail_pages)});
      ++stats_.num_stored;
    }
    index_.touch(mine);
    evict();
  }
  changed_.notify_all();
}

void DiskTier::add(TierItem item) {
  const TierIndex::Place place = index_.add(std::move(item));
  waiting_.push_back({place->id, place->bytes});
  waiting_bytes_ += place->bytes;
}

void DiskTier::remove(TierIndex::Place place) {
  // One that still waits is not found when its turn comes; one under way is removed after it.
  if (place->first == nullptr) removed_.push_back(place->id);
  uses_.erase(place->id);
  index_.remove(place);
}

void DiskTier::evict() {
  for (; index_.bytes() > options_.budget_bytes; ++stats_.num_evicted) remove(index_.oldest());
}

void DiskTier::forget(const PrefixText& text) {
  if (!is_on_) return;
  const std::vector<PrefixDigest> digests = masked(text.digests);
  {
    const std::lock_guard<std::mutex> hold(lock_);
    for (const TierIndex::Place place : index_.of_beginnings({digests, text.ids})) {
      // At once: the process may be about to end, and a row without a file is nothing.
      if (place->first == nullptr) ::unlink(path_of(place->id).c_str());
      remove(place);
    }
  }
  changed_.notify_all();
}

void DiskTier::report(const std::string& what) {
  ++stats_.num_faults;
  if (options_.log == nullptr || now() - last_report_ < kReportSeconds) return;
  last_report_ = now();
  options_.log->write(LogLevel::kWarning, "prefix cache on disk: " + what);
}

TierStats DiskTier::stats() const {
  const std::lock_guard<std::mutex> hold(lock_);
  TierStats out = stats_;
  out.num_snapshots = index_.num_states(), out.num_segments = index_.num_segments();
  out.bytes = index_.bytes(), out.total_bytes = options_.budget_bytes;
  return out;
}

void DiskTier::flush() {
  std::unique_lock<std::mutex> hold(lock_);
  idle_.wait(hold, [&] { return !is_on_ || (waiting_.empty() && removed_.empty() && !is_working_); });
}

// The tier's thread.
void DiskTier::work() {
  std::unique_lock<std::mutex> hold(lock_);
  for (;;) {
    changed_.wait(hold, [&] { return is_ending_ || !waiting_.empty() || !removed_.empty(); });
    if (is_ending_) break;
    is_working_ = true;
    const std::vector<int64_t> removed = std::exchange(removed_, {});
    if (!removed.empty()) {
      hold.unlock();
      erase(removed);
      hold.lock();
    }
    if (!waiting_.empty() && !is_ending_) {
      const Waiting next = waiting_.front();
      waiting_.pop_front();
      const TierIndex::Place place = index_.item(next.id);
      if (place != index_.end()) {
        const TierItem item = *place;
        hold.unlock();
        write(item);
        hold.lock();
      }
      waiting_bytes_ -= next.bytes;
    }
    is_working_ = false;
    if (waiting_.empty() && removed_.empty()) idle_.notify_all();
  }
  const std::vector<int64_t> removed = std::exchange(removed_, {});
  hold.unlock();
  if (!removed.empty()) erase(removed);
  save_uses();
}

// Gives up what was not used for the longest until the disk has room for the item. False: nothing more is there to go.
bool DiskTier::make_space(const TierItem& item) {
  const auto find_lacking = [&] {
    const int64_t free =
        options_.space != nullptr ? options_.space->free_bytes(options_.folder) : free_bytes_of(options_.folder);
    return item.bytes + options_.least_free_bytes - free;
  };
  const int64_t lacking = find_lacking();
  if (lacking <= 0) return true;
  std::vector<int64_t> ids;
  {
    const std::lock_guard<std::mutex> hold(lock_);
    if (!std::exchange(is_full_, true) && options_.log != nullptr) {
      const int64_t needed = item.bytes + options_.least_free_bytes;
      options_.log->write(LogLevel::kWarning,
                          fmt::format("prefix cache on disk: {}: expected {} free, found {}; the oldest entries go",
                                      printable(options_.folder), format_bytes(static_cast<uint64_t>(needed)),
                                      format_bytes(static_cast<uint64_t>(needed - lacking))));
    }
    int64_t bytes = 0;
    for (const TierItem& old : index_.items()) {
      if (bytes >= lacking) break;
      if (old.first != nullptr) continue;  // not written yet
      bytes += old.bytes;
      ids.push_back(old.id);
    }
    if (bytes < lacking) return false;  // others fill the disk: what is here would go for nothing
    for (const int64_t id : ids) {
      uses_.erase(id);
      index_.remove(index_.item(id));
    }
    stats_.num_evicted += static_cast<int64_t>(ids.size());
  }
  // Files first: a row's removal needs room itself, and a row without a file is dropped at the next start.
  for (const int64_t id : ids) ::unlink(path_of(id).c_str());
  erase(ids);
  // Once: where room comes back late, asking again at once would empty the cache.
  return find_lacking() <= 0;
}

// Its file, then its row: a file without one is nobody's, and swept.
void DiskTier::write(const TierItem& item) {
  if (!make_space(item)) {
    const std::lock_guard<std::mutex> hold(lock_);
    ++stats_.num_dropped;
    const TierIndex::Place place = index_.item(item.id);
    if (place != index_.end()) remove(place);
    return;
  }
  std::string fault;
  try {
    write_tier_file(path_of(item.id), {identity_, item.digest, item.is_segment, item.tail, item.first, item.second});
    files_->insert(item);
  } catch (const std::exception& error) {
    fault = error.what();
    ::unlink(path_of(item.id).c_str());
  }
  const std::lock_guard<std::mutex> hold(lock_);
  const TierIndex::Place place = index_.item(item.id);
  if (!fault.empty()) {
    report(fmt::format("{}; answers do not need it", fault));
    uses_.erase(item.id);
    if (place != index_.end()) index_.remove(place);
    return;
  }
  if (place == index_.end()) {
    removed_.push_back(item.id);  // given up or forgotten meanwhile
  } else {
    place->first = nullptr, place->second = nullptr;
    if (place->last_use != item.last_use) uses_[item.id] = place->last_use;
  }
}

// Rows first: a row without a file is dropped at the next start, a file without a row too.
void DiskTier::erase(const std::vector<int64_t>& ids) {
  for (const int64_t id : ids) {
    try {
      files_->remove(id);
    } catch (const std::exception& error) {
      const std::lock_guard<std::mutex> hold(lock_);
      report(error.what());
    }
    ::unlink(path_of(id).c_str());
  }
}

void DiskTier::save_uses() {
  std::vector<std::pair<int64_t, int64_t>> uses;
  {
    const std::lock_guard<std::mutex> hold(lock_);
    uses.assign(uses_.begin(), uses_.end());
    uses_.clear();
  }
  try {
    files_->set_last_use(uses);
  } catch (const std::exception& error) {
    const std::lock_guard<std::mutex> hold(lock_);
    report(error.what());
  }
}

}  // namespace tessera::engine
