// SPDX-License-Identifier: Apache-2.0
#pragma once
// Snapshots on a disk, for later lives of the process too (decision 0028): files, an index of them in SQLite, and a
// thread that writes and removes them, so that the engine never waits for a write. Whatever the disk does costs a hit,
// a log line and a count, never a request.
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>

#include "base/log.h"
#include "engine/tier_file.h"
#include "engine/tier_index.h"

namespace tessera::engine {

class DiskIndex;

// Asked by the tier's thread.
class DiskSpace {
 public:
  virtual ~DiskSpace() = default;
  // That this user may still write where the folder lies.
  virtual int64_t free_bytes(const std::string& folder) const = 0;
};

struct DiskTierOptions {
  std::string folder;        // made where it is not there; of this process alone while it lives
  int64_t budget_bytes = 0;  // of files; what was not used for the longest goes first
  // Where the disk would have less than this left, the oldest entries go however much the budget allows.
  int64_t least_free_bytes = int64_t{64} << 20;
  // All that the bits of a state follow from, besides its tokens: what another identity wrote is never found.
  std::string identity;
  int64_t queue_bytes = int64_t{256} << 20;  // that may wait to be written; snapshots beyond are not taken
  double ending_seconds = 5;                 // for what waits, at the end
  LogSink* log = nullptr;                    // null: none. Called by the engine's thread and the tier's own
  const DiskSpace* space = nullptr;          // null: as the system says
};

class DiskTier final : public PrefixTier {
 public:
  // Where the folder can't be used the tier is off, has said why and counted a fault, and knows nothing.
  explicit DiskTier(DiskTierOptions options);
  // Writes what waits, for as long as it may.
  ~DiskTier() override;
  DiskTier(const DiskTier&) = delete;
  DiskTier& operator=(const DiskTier&) = delete;

  bool is_on() const { return is_on_; }
  int64_t longest(const PrefixText& text, int64_t most) override;
  std::optional<SnapshotBytes> load(const PrefixKey& key) override;
  bool has_state(const PrefixKey& key) override;
  bool has_segment(const PrefixDigest& digest) override;
  bool has_room(int64_t bytes) override;
  void put(const PrefixKey& key, SnapshotBytes bytes) override;
  void touch(const PrefixKey& key) override;
  void forget(const PrefixText& text) override;
  TierStats stats() const override;

  // Returns when nothing waits to be written or removed.
  void flush();

 private:
  void open();
  void take_lock();
  void sweep(const std::vector<TierItem>& kept);
  std::string path_of(int64_t id) const;
  PrefixDigest masked(const PrefixDigest& digest) const;
  std::vector<PrefixDigest> masked(std::span<const PrefixDigest> digests) const;
  // With lock_ held:
  void add(TierItem item);
  void remove(TierIndex::Place place);
  void evict();
  void use(const PrefixKey& masked_key);
  // A fault: counted, and said once in a while.
  void report(const std::string& what);
  void work();
  bool make_space(const TierItem& item);
  void write(const TierItem& item);
  void erase(const std::vector<int64_t>& ids);
  void save_uses();

  const DiskTierOptions options_;
  PrefixDigest identity_{};
  int lock_file_ = -1;
  bool is_on_ = false;
  std::unique_ptr<DiskIndex> files_;  // of the thread

  mutable std::mutex lock_;
  std::condition_variable changed_, idle_;
  TierIndex index_;
  struct Waiting {
    int64_t id = 0, bytes = 0;
  };
  std::deque<Waiting> waiting_;                // to be written; bytes are in memory until then
  int64_t waiting_bytes_ = 0;                  // with those of the one that is being written
  std::vector<int64_t> removed_;               // ids whose files shall go
  std::unordered_map<int64_t, int64_t> uses_;  // ids, last_use: since they were saved last
  bool is_working_ = false, is_ending_ = false;
  bool is_full_ = false;  // the disk was; said once
  double last_report_ = -1e9;
  TierStats stats_{.name = "disk"};
  std::thread thread_;
};

}  // namespace tessera::engine
