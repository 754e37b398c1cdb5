// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which files a disk tier has, in a SQLite database that survives whatever ends the process (docs/formats/
// prefix-cache.md). One thread at a time.
#include <cstdint>
#include <string>
#include <vector>

#include "engine/tier_index.h"

struct sqlite3;
struct sqlite3_stmt;

namespace tessera::engine {

class DiskIndex {
 public:
  // Opens it, or makes an empty one that its owner alone may read. Throws kDataLoss where it is damaged, kUnsupported
  // where it is of another program or version, kResourceExhausted where it can't be opened or made.
  explicit DiskIndex(const std::string& path);
  ~DiskIndex();
  DiskIndex(const DiskIndex&) = delete;
  DiskIndex& operator=(const DiskIndex&) = delete;

  // Whether the file is a database of this program, damaged or not. False where it can't be read.
  static bool is_ours(const std::string& path);

  // Everything, the least recently used first. Throws kDataLoss where a row says what none may.
  std::vector<TierItem> read();
  // Each is whole after it or has not been, even where the process is killed. Throw kResourceExhausted.
  void insert(const TierItem& item);
  void remove(int64_t id);
  void set_last_use(const std::vector<std::pair<int64_t, int64_t>>& uses);  // ids, last_use

 private:
  class Statement;
  void run(const char* sql);
  int64_t number(const char* sql);
  [[noreturn]] void fail_now(const char* action, int code) const;

  std::string path_;
  sqlite3* database_ = nullptr;
};

}  // namespace tessera::engine
