// SPDX-License-Identifier: Apache-2.0
#include "engine/disk_index.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sqlite3.h>
#include <unistd.h>

#include <cstring>

#include "base/error.h"
#include "base/file.h"
#include "base/strings.h"
#include "base/test_seams.h"

namespace tessera::engine {

namespace {

constexpr int64_t kApplicationId = 0x54535031;  // "TSP1"
constexpr int64_t kVersion = 1;
constexpr size_t kApplicationIdOffset = 68;  // in a database's header, four bytes, big-endian
constexpr int64_t kMaxBytes = int64_t{1} << 40;
constexpr int64_t kMaxNumber = int64_t{1} << 62;  // ids and uses go on from the largest

}  // namespace

class DiskIndex::Statement {
 public:
  Statement(DiskIndex& index, const char* sql) : index_(index) {
    // SQLite's own calls pass no seam, so each statement stands for one.
    const int code = seams::is_failing_file_call() ? SQLITE_IOERR
                                                   : sqlite3_prepare_v2(index.database_, sql, -1, &statement_, nullptr);
    if (code != SQLITE_OK) index.fail_now("prepare", code);
  }
  ~Statement() { sqlite3_finalize(statement_); }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  Statement& bind(int place, int64_t value) {
    check(sqlite3_bind_int64(statement_, place, value));
    return *this;
  }
  Statement& bind(int place, const void* data, size_t bytes) {
    // A null pointer would be NULL, not an empty blob.
    check(sqlite3_bind_blob(statement_, place, bytes == 0 ? "" : data, static_cast<int>(bytes), SQLITE_TRANSIENT));
    return *this;
  }
  // False: no further row.
  bool step() {
    const int code = sqlite3_step(statement_);
    if (code != SQLITE_ROW && code != SQLITE_DONE) index_.fail_now("use", code);
    return code == SQLITE_ROW;
  }
  void reset() { check(sqlite3_reset(statement_)); }
  int64_t number(int column) const { return sqlite3_column_int64(statement_, column); }
  std::span<const uint8_t> blob(int column) const {
    const void* data = sqlite3_column_blob(statement_, column);
    return {static_cast<const uint8_t*>(data), static_cast<size_t>(sqlite3_column_bytes(statement_, column))};
  }

 private:
  void check(int code) {
    if (code != SQLITE_OK) index_.fail_now("use", code);
  }
  DiskIndex& index_;
  sqlite3_stmt* statement_ = nullptr;
};

void DiskIndex::fail_now(const char* action, int code) const {
  const int primary = code & 0xFF;
  const bool is_damaged = primary == SQLITE_CORRUPT || primary == SQLITE_NOTADB;
  const char* what = database_ == nullptr ? sqlite3_errstr(code) : sqlite3_errmsg(database_);
  fail(is_damaged ? ErrorCode::kDataLoss : ErrorCode::kResourceExhausted,
       fmt::format("{}: cannot {} the index: {}", printable(path_), action, what));
}

bool DiskIndex::is_ours(const std::string& path) {
  try {
    const File file = File::open_read(path);
    uint8_t head[kApplicationIdOffset + 4];
    file.read_at(0, head, sizeof(head));
    int64_t id = 0;
    for (size_t i = kApplicationIdOffset; i < sizeof(head); ++i) id = id << 8 | head[i];
    return std::memcmp(head, "SQLite format 3", 16) == 0 && id == kApplicationId;
  } catch (const Error&) {
    return false;
  }
}

DiskIndex::DiskIndex(const std::string& path) : path_(path) {
  // SQLite gives its other files the access of this one.
  const int descriptor =
      seams::is_failing_file_call() ? -1 : ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (descriptor < 0) fail(ErrorCode::kResourceExhausted, fmt::format("{}: cannot open the index", printable(path_)));
  ::close(descriptor);
  try {
    const int code = sqlite3_open_v2(path.c_str(), &database_, SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX, nullptr);
    if (code != SQLITE_OK) fail_now("open", code);
    sqlite3_extended_result_codes(database_, 1);
    // Nobody else uses it, so it needs no memory that is shared through a file.
    run("PRAGMA locking_mode=EXCLUSIVE");
    run("PRAGMA trusted_schema=OFF");
    run("PRAGMA secure_delete=ON");
    run("PRAGMA cell_size_check=ON");
    const int64_t id = number("PRAGMA application_id"), version = number("PRAGMA user_version");
    const bool is_empty = number("SELECT count(*) FROM sqlite_master") == 0;
    if (is_empty && (id == 0 || id == kApplicationId)) {
      // In this order: what is not whole is known as ours.
      run(fmt::format("PRAGMA application_id={}", kApplicationId).c_str());
      run("CREATE TABLE files(id INTEGER PRIMARY KEY, is_segment INTEGER NOT NULL, digest BLOB NOT NULL, "
          "tail BLOB NOT NULL, bytes INTEGER NOT NULL, last_use INTEGER NOT NULL)");
      run(fmt::format("PRAGMA user_version={}", kVersion).c_str());
    } else if (id != kApplicationId || version != kVersion) {
      fail(ErrorCode::kUnsupported,
           fmt::format("{}: application and version: expected {} and {}, found {} and {}: no index of this program",
                       printable(path_), kApplicationId, kVersion, id, version));
    }
    run("PRAGMA journal_mode=WAL");
    run("PRAGMA synchronous=NORMAL");
  } catch (...) {
    sqlite3_close(database_);
    throw;
  }
}

DiskIndex::~DiskIndex() {
  sqlite3_close(database_);
}

void DiskIndex::run(const char* sql) {
  Statement statement(*this, sql);
  while (statement.step()) {
  }
}

int64_t DiskIndex::number(const char* sql) {
  Statement statement(*this, sql);
  return statement.step() ? statement.number(0) : 0;
}

std::vector<TierItem> DiskIndex::read() {
  {
    Statement check(*this, "PRAGMA quick_check(1)");
    const bool has_row = check.step();
    const std::span<const uint8_t> found = has_row ? check.blob(0) : std::span<const uint8_t>();
    if (std::string(found.begin(), found.end()) != "ok") fail_data(path_, "index", "a sound one", "a damaged one");
  }
  std::vector<TierItem> items;
  Statement rows(*this, "SELECT id, is_segment, digest, tail, bytes, last_use FROM files ORDER BY last_use, id");
  while (rows.step()) {
    TierItem item;
    item.id = rows.number(0), item.is_segment = rows.number(1) != 0;
    const std::span<const uint8_t> digest = rows.blob(2), tail = rows.blob(3);
    item.bytes = rows.number(4), item.last_use = rows.number(5);
    if (item.id <= 0 || digest.size() != item.digest.size() || tail.size() % sizeof(int32_t) != 0 ||
        tail.size() >= static_cast<size_t>(kDigestTokens) * sizeof(int32_t) || item.bytes < 0 ||
        item.bytes > kMaxBytes || item.id > kMaxNumber || item.last_use < 0 || item.last_use > kMaxNumber) {
      fail_data(path_, "index", "rows of files", fmt::format("row {}", item.id));
    }
    std::memcpy(item.digest.data(), digest.data(), digest.size());
    item.tail.resize(tail.size() / sizeof(int32_t));
    if (!tail.empty()) std::memcpy(item.tail.data(), tail.data(), tail.size());
    items.push_back(std::move(item));
  }
  return items;
}

void DiskIndex::insert(const TierItem& item) {
  Statement(*this, "INSERT OR REPLACE INTO files VALUES(?1, ?2, ?3, ?4, ?5, ?6)")
      .bind(1, item.id)
      .bind(2, int64_t{item.is_segment})
      .bind(3, item.digest.data(), item.digest.size())
      .bind(4, item.tail.data(), item.tail.size() * sizeof(int32_t))
      .bind(5, item.bytes)
      .bind(6, item.last_use)
      .step();
}

void DiskIndex::remove(int64_t id) {
  Statement(*this, "DELETE FROM files WHERE id = ?1").bind(1, id).step();
}

void DiskIndex::set_last_use(const std::vector<std::pair<int64_t, int64_t>>& uses) {
  if (uses.empty()) return;
  run("BEGIN");
  try {
    Statement update(*this, "UPDATE files SET last_use = ?2 WHERE id = ?1");
    for (const auto& [id, last_use] : uses) {
      update.bind(1, id).bind(2, last_use).step();
      update.reset();
    }
    run("COMMIT");
  } catch (...) {
    sqlite3_exec(database_, "ROLLBACK", nullptr, nullptr, nullptr);
    throw;
  }
}

}  // namespace tessera::engine
