// SPDX-License-Identifier: Apache-2.0
// The tiers below the prefix cache: what comes back from the host's memory and from a disk, in this life of the process
// and in later ones, and what becomes of it when a disk fails.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/test_seams.h"
#include "engine/disk_tier.h"
#include "engine/hash_runner.h"
#include "engine/host_tier.h"
#include "engine/prefix_cache.h"
#include "testing/seed.h"
#include "testing/temporary_folder.h"

namespace tessera::engine {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kLongest = 3000, kPage = 16;
constexpr int64_t kPageBytes = kPage * HashRunner::kTokenBytes;

class Lines final : public LogSink {
 public:
  void write(LogLevel, std::string_view message) override {
    const std::lock_guard<std::mutex> hold(lock_);
    lines_.emplace_back(message);
  }
  std::vector<std::string> all() const {
    const std::lock_guard<std::mutex> hold(lock_);
    return lines_;
  }

 private:
  mutable std::mutex lock_;
  std::vector<std::string> lines_;
};

class TiersTest : public ::testing::Test {
 protected:
  TiersTest() : seed_(fresh_seed()), rng_(seed_), trace_(__FILE__, __LINE__, "seed " + std::to_string(seed_)) {}

  std::vector<int32_t> random_ids(int64_t count) {
    std::vector<int32_t> ids(static_cast<size_t>(count));
    for (int32_t& id : ids) id = static_cast<int32_t>(rng_.below(kHashVocab));
    return ids;
  }
  static std::vector<int32_t> first_of(const std::vector<int32_t>& ids, int64_t count) {
    return {ids.begin(), ids.begin() + count};
  }
  void feed(model::SequenceState& state, std::span<const int32_t> ids) {
    const model::SequenceSlice slice{&state, ids, model::LogitRows::kNone};
    runner_.step({&slice, 1});
  }
  std::unique_ptr<model::SequenceState> run(const std::vector<int32_t>& ids) {
    auto state = runner_.new_sequence(kLongest);
    feed(*state, ids);
    return state;
  }
  void offer(PrefixCache& cache, const std::vector<int32_t>& ids, const Request& request = {}) {
    cache.offer(request, ids, *run(ids));
    cache.audit();
  }
  // How much of `ids` is known; what is found must be what a sequence of these tokens is.
  int64_t found(PrefixCache& cache, const std::vector<int32_t>& ids, const Request& request = {}) {
    const auto state = cache.find(request, ids, kLongest);
    cache.audit();
    if (state == nullptr) return 0;
    const int64_t position = state->position();
    feed(*state, std::span(ids).subspan(static_cast<size_t>(position)));
    EXPECT_EQ(state->save(), run(ids)->save());
    return position;
  }
  DiskTierOptions disk_options(const std::string& identity = "a model") const {
    return {.folder = folder_.file("cache"), .budget_bytes = 1 << 20, .identity = identity, .log = log_.get()};
  }
  PrefixCacheOptions cache_options(PrefixTier* disk, int64_t budget_bytes = 1 << 20) const {
    return {.budget_bytes = budget_bytes, .least_gain_tokens = 1, .disk = disk, .least_load_tokens = 1};
  }
  std::vector<fs::path> payloads() const {
    std::vector<fs::path> out;
    for (const auto& entry : fs::directory_iterator(folder_.file("cache"))) {
      if (entry.path().extension() == ".snap") out.push_back(entry.path());
    }
    std::sort(out.begin(), out.end());
    return out;
  }

  // The largest name: ids rise.
  std::string newest() const {
    std::string name;
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(folder_.file("cache"), error)) {
      if (entry.path().extension() == ".snap") name = std::max(name, entry.path().string());
    }
    return name;
  }

  uint64_t seed_;
  Rng rng_;
  ::testing::ScopedTrace trace_;
  testing::TemporaryFolder folder_;
  std::unique_ptr<Lines> log_ = std::make_unique<Lines>();
  PagedBudget budget_{kPage, int64_t{1} << 40};
  HashRunner runner_{kLongest, kLongest, budget_, {}, 1, {.page_tokens = kPage}};
};

TEST_F(TiersTest, WhatTheBudgetGivesUpComesBackFromTheHost) {
  HostTier host(1 << 20);
  // Room for one snapshot of 600 tokens.
  const int64_t one = HashRunner::kSnapshotBytes + 40 * kPageBytes;
  PrefixCache cache(runner_, {.budget_bytes = one, .least_gain_tokens = 1, .host = &host, .least_load_tokens = 1});
  const std::vector<int32_t> a = random_ids(630), b = random_ids(630);
  offer(cache, first_of(a, 600));
  EXPECT_EQ(host.stats().num_snapshots, 0);
  offer(cache, first_of(b, 600));
  EXPECT_EQ(cache.stats().num_snapshots, 1);
  EXPECT_EQ(host.stats().num_snapshots, 1);
  EXPECT_EQ(host.stats().num_segments, 2);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(found(cache, a), 600);
    EXPECT_EQ(found(cache, b), 600);
  }
  EXPECT_EQ(host.stats().num_hits, 6) << "each pushes the other one out";
  EXPECT_EQ(host.stats().num_hit_tokens, 6 * 600);
  EXPECT_EQ(host.stats().num_stored, 2) << "what is there is not stored again";
  Request salted;
  salted.cache_salt = "another";
  EXPECT_EQ(found(cache, a, salted), 0);
  cache.forget({}, a);
  EXPECT_EQ(found(cache, a), 0);
  EXPECT_EQ(found(cache, b), 600);
  cache.forget({}, b);
  EXPECT_EQ(host.stats().bytes, 0);
  EXPECT_EQ(runner_.num_pages(), 0);
}

TEST_F(TiersTest, SegmentsAreKeptOnceAndBudgetsHold) {
  const std::vector<int32_t> text = random_ids(900);
  HostTier host(1 << 20);
  {
    PrefixCache cache(runner_,
                      {.budget_bytes = 1 << 20, .least_gain_tokens = 1, .host = &host, .least_load_tokens = 1});
    for (const int64_t count : {300, 520, 530, 800}) offer(cache, first_of(text, count));
    while (cache.give_up()) {
    }
    EXPECT_EQ(host.stats().num_snapshots, 4);
    EXPECT_EQ(host.stats().num_segments, 3);
    EXPECT_EQ(host.stats().bytes, 4 * HashRunner::kSnapshotBytes + (3 + 1 + 2 + 2) * kPageBytes + 3 * 16 * kPageBytes);
    EXPECT_EQ(found(cache, text), 800);
    EXPECT_EQ(found(cache, first_of(text, 600)), 530);
  }
  // A small one holds its budget whatever comes, and gives back only what is whole.
  const int64_t small = 40 * kPageBytes;
  HostTier tight(small);
  PrefixCache cache(runner_, {.budget_bytes = 1 << 20, .least_gain_tokens = 1, .host = &tight, .least_load_tokens = 1});
  int64_t num_found = 0;
  std::vector<std::vector<int32_t>> texts = {text, random_ids(900), random_ids(900)};
  for (int i = 0; i < 200; ++i) {
    const std::vector<int32_t>& one = texts[rng_.below(3)];
    const std::vector<int32_t> beginning = first_of(one, 1 + static_cast<int64_t>(rng_.below(899)));
    num_found += found(cache, beginning) > 0 ? 1 : 0;
    offer(cache, beginning);
    while (cache.give_up()) {
    }
    EXPECT_LE(tight.stats().bytes, small);
  }
  EXPECT_GT(num_found, 10);
  EXPECT_GT(tight.stats().num_evicted, 10);
}

TEST_F(TiersTest, ADiskOutlivesTheProcess) {
  const std::vector<int32_t> text = random_ids(900), other = random_ids(300);
  Request mine;
  mine.cache_salt = "mine";
  {
    DiskTier disk(disk_options());
    ASSERT_TRUE(disk.is_on());
    PrefixCache cache(runner_, cache_options(&disk));
    for (const int64_t count : {40, 300, 800}) offer(cache, first_of(text, count));
    offer(cache, other, mine);
    EXPECT_EQ(disk.stats().num_stored, 4);
  }
  {
    DiskTier disk(disk_options());
    PrefixCache cache(runner_, cache_options(&disk));
    EXPECT_EQ(disk.stats().num_snapshots, 4);
    EXPECT_EQ(disk.stats().num_segments, 4);
    EXPECT_EQ(found(cache, text), 800);
    EXPECT_EQ(found(cache, text), 800) << "from memory now";
    EXPECT_EQ(disk.stats().num_hits, 1);
    EXPECT_EQ(found(cache, first_of(text, 799)), 300);
    EXPECT_EQ(found(cache, first_of(text, 300)), 40);
    std::vector<int32_t> longer = other;
    longer.push_back(1);
    EXPECT_EQ(found(cache, longer), 0) << "another salt";
    EXPECT_EQ(found(cache, longer, mine), 300);
    EXPECT_EQ(disk.stats().num_faults, 0);
  }
  {
    DiskTier disk(disk_options("another model"));
    PrefixCache cache(runner_, cache_options(&disk));
    EXPECT_EQ(found(cache, text), 0);
    EXPECT_EQ(disk.stats().num_snapshots, 4) << "they go in their turn";
  }
  EXPECT_TRUE(log_->all().empty());
  // Nobody else may read any of it.
  struct stat info {};
  ASSERT_EQ(::stat(folder_.file("cache").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
  for (const auto& entry : fs::directory_iterator(folder_.file("cache"))) {
    ASSERT_EQ(::stat(entry.path().c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600u) << entry.path();
  }
}

TEST_F(TiersTest, TheDiskHoldsItsBudgetAndTheOldestGo) {
  DiskTierOptions options = disk_options();
  options.budget_bytes = 40'000;
  std::vector<std::vector<int32_t>> texts;
  for (int i = 0; i < 30; ++i) texts.push_back(random_ids(300));
  {
    DiskTier disk(options);
    PrefixCache cache(runner_, cache_options(&disk));
    for (const std::vector<int32_t>& text : texts) {
      offer(cache, text);
      EXPECT_LE(disk.stats().bytes, options.budget_bytes);
    }
    disk.flush();
    int64_t bytes = 0;
    for (const fs::path& path : payloads()) bytes += static_cast<int64_t>(fs::file_size(path));
    EXPECT_EQ(bytes, disk.stats().bytes);
    EXPECT_GT(disk.stats().num_evicted, 0);
    EXPECT_EQ(payloads().size(), static_cast<size_t>(disk.stats().num_snapshots + disk.stats().num_segments));
  }
  options.budget_bytes = 20'000;  // less than what is there
  DiskTier disk(options);
  EXPECT_LE(disk.stats().bytes, options.budget_bytes);
  PrefixCache cache(runner_, cache_options(&disk));
  texts.back().push_back(1), texts.front().push_back(1);
  EXPECT_EQ(found(cache, texts.back()), 300);
  EXPECT_EQ(found(cache, texts.front()), 0);
}

// Each life stores as much; there is room for two. The third one drops what the first has stored, and nothing of the
// second's, whose uses are counted on.
TEST_F(TiersTest, UsesAreInOrderOverLives) {
  constexpr size_t kEach = 10;
  std::vector<std::vector<int32_t>> texts;
  for (size_t i = 0; i < 3 * kEach; ++i) texts.push_back(random_ids(301));
  DiskTierOptions options = disk_options();
  for (size_t life = 0; life < 3; ++life) {
    DiskTier disk(options);
    PrefixCache cache(runner_, cache_options(&disk));
    for (size_t i = 0; i < kEach; ++i) offer(cache, first_of(texts[life * kEach + i], 300));
    if (life == 0) options.budget_bytes = 2 * disk.stats().bytes;
    disk.flush();
  }
  DiskTier disk(options);
  EXPECT_EQ(disk.stats().bytes, options.budget_bytes);
  PrefixCache cache(runner_, cache_options(&disk));
  for (size_t i = 0; i < texts.size(); ++i) EXPECT_EQ(found(cache, texts[i]), i < kEach ? 0 : 300) << i;
}

TEST_F(TiersTest, HitsInMemoryAreUsesOfTheDisksCopy) {
  DiskTierOptions options = disk_options();
  options.budget_bytes = 60'000;
  std::vector<int32_t> often = random_ids(300);
  {
    DiskTier disk(options);
    PrefixCache cache(runner_, cache_options(&disk));
    offer(cache, often);
    often.push_back(1);
    for (int i = 0; i < 60; ++i) {
      offer(cache, random_ids(300));
      EXPECT_EQ(found(cache, often), 300);
    }
    EXPECT_GT(disk.stats().num_evicted, 60);
    EXPECT_EQ(disk.stats().num_hits, 0) << "all of them were in memory";
    disk.flush();
  }
  DiskTier disk(options);
  PrefixCache cache(runner_, cache_options(&disk));
  EXPECT_EQ(found(cache, often), 300);
}

// A disk of so many bytes, with nothing on it but the folder's files.
class SmallDisk final : public DiskSpace {
 public:
  explicit SmallDisk(int64_t bytes) : bytes_(bytes) {}
  int64_t free_bytes(const std::string& folder) const override {
    int64_t used = 0;
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (entry.path().extension() == ".snap") used += static_cast<int64_t>(entry.file_size());
    }
    return bytes_ - used;
  }

 private:
  const int64_t bytes_;
};

TEST_F(TiersTest, AFullDiskIsRelievedOfTheOldest) {
  const SmallDisk space(50'000);
  DiskTierOptions options = disk_options();
  options.space = &space, options.least_free_bytes = 10'000;
  std::vector<int32_t> last;
  {
    DiskTier disk(options);
    PrefixCache cache(runner_, cache_options(&disk));
    for (int i = 0; i < 30; ++i) {
      last = random_ids(300);
      offer(cache, last);
      disk.flush();
      EXPECT_GE(space.free_bytes(options.folder), options.least_free_bytes);
    }
    EXPECT_GT(disk.stats().num_evicted, 0);
    EXPECT_EQ(disk.stats().num_faults, 0);
    EXPECT_EQ(payloads().size(), static_cast<size_t>(disk.stats().num_snapshots + disk.stats().num_segments));
  }
  ASSERT_EQ(log_->all().size(), 1u);
  EXPECT_NE(log_->all()[0].find("the oldest entries go"), std::string::npos) << log_->all()[0];
  DiskTier disk(options);
  PrefixCache cache(runner_, cache_options(&disk));
  last.push_back(1);
  EXPECT_EQ(found(cache, last), 300);

  const SmallDisk none(0);
  options.space = &none, options.folder = folder_.file("other");
  DiskTier full(options);
  PrefixCache above(runner_, cache_options(&full));
  offer(above, random_ids(300));
  full.flush();
  EXPECT_EQ(full.stats().num_snapshots + full.stats().num_segments, 0);
  EXPECT_GT(full.stats().num_dropped, 0);
}

TEST_F(TiersTest, WhatMemoryHasNoRoomForHidesNothing) {
  const std::vector<int32_t> text = random_ids(900);
  {
    DiskTier disk(disk_options());
    PrefixCache cache(runner_, cache_options(&disk));
    for (const int64_t count : {300, 880}) offer(cache, first_of(text, count));
  }
  DiskTier disk(disk_options());
  PrefixCache small(runner_, cache_options(&disk, HashRunner::kSnapshotBytes + 20 * kPageBytes));
  EXPECT_EQ(found(small, text), 300);
  PrefixCache none(runner_, cache_options(&disk, HashRunner::kSnapshotBytes - 1));
  EXPECT_EQ(found(none, text), 0);
}

TEST_F(TiersTest, DamagedFilesAreMissesAndGo) {
  const std::vector<int32_t> text = random_ids(700);
  for (int i = 0; i < 16; ++i) {
    {
      DiskTier disk(disk_options());
      PrefixCache cache(runner_, cache_options(&disk));
      offer(cache, first_of(text, 100)), offer(cache, first_of(text, 600));
    }
    const std::vector<fs::path> all = payloads();
    ASSERT_EQ(all.size(), 4u);
    const fs::path victim = all[rng_.below(all.size())];
    const auto size = static_cast<int64_t>(fs::file_size(victim));
    switch (i % 4) {
      case 0: {  // a bit
        std::fstream file(victim, std::ios::in | std::ios::out | std::ios::binary);
        const auto at = static_cast<std::streamoff>(rng_.below(static_cast<uint64_t>(size)));
        file.seekg(at);
        const char byte = static_cast<char>(file.get() ^ (1 << rng_.below(8)));
        file.seekp(at);
        file.put(byte);
        break;
      }
      case 1:
        fs::resize_file(victim, rng_.below(static_cast<uint64_t>(size)));
        break;
      case 2:  // another one's
        fs::copy_file(all[(static_cast<size_t>(std::find(all.begin(), all.end(), victim) - all.begin()) + 1) % 4],
                      victim, fs::copy_options::overwrite_existing);
        break;
      case 3:
        fs::resize_file(victim, static_cast<uint64_t>(size) + 1);
        break;
    }
    DiskTier disk(disk_options());
    PrefixCache cache(runner_, cache_options(&disk));
    const int64_t position = found(cache, text);
    EXPECT_TRUE(position == 600 || position == 100 || position == 0) << position;
    const int64_t shorter = found(cache, first_of(text, 200));
    EXPECT_TRUE(shorter == 100 || shorter == 0);
    EXPECT_EQ(disk.stats().num_faults, 1);
    EXPECT_EQ(found(cache, text), position) << "it is not asked for again";
    EXPECT_EQ(disk.stats().num_faults, 1);
    offer(cache, first_of(text, 600)), offer(cache, first_of(text, 100));
    disk.flush();
    EXPECT_EQ(fs::exists(victim), false) << "what takes its place has another name";
    fs::remove_all(folder_.file("cache"));
  }
  for (const std::string& line : log_->all()) EXPECT_EQ(line.find('\n'), std::string::npos) << line;
  EXPECT_EQ(log_->all().size(), 16u);
}

TEST_F(TiersTest, FoldersThatCannotBeUsedTurnItOff) {
  const auto expect_off = [&](DiskTierOptions options, const std::string& part) {
    Lines log;
    options.log = &log;
    DiskTier disk(options);
    EXPECT_FALSE(disk.is_on());
    EXPECT_EQ(disk.stats().num_faults, 1);
    ASSERT_EQ(log.all().size(), 1u);
    EXPECT_NE(log.all()[0].find(part), std::string::npos) << log.all()[0];
    PrefixCache cache(runner_, cache_options(&disk));
    offer(cache, random_ids(300));
    EXPECT_EQ(found(cache, random_ids(300)), 0);
    disk.flush();
  };
  DiskTierOptions options = disk_options();
  {
    DiskTier first(options);
    expect_off(options, "another server uses this cache folder");
  }
  options.folder = folder_.write("file", "x");
  expect_off(options, "expected a folder");
  options.folder = "";
  expect_off(options, "an empty one");
  options.folder = "/proc/tessera";
  expect_off(options, "cannot create");
  options.folder = folder_.file("open");
  fs::create_directory(options.folder);
  fs::permissions(options.folder, fs::perms::all);
  expect_off(options, "nobody else");
  // Another program's database is left alone, and so is what only looks like one.
  for (const std::string& content : {std::string("SQLite format 3\0 of somebody else", 34), std::string(5000, 'x')}) {
    options.folder = folder_.file("foreign");
    fs::create_directory(options.folder);
    fs::permissions(options.folder, fs::perms::owner_all);
    folder_.write("foreign/index.sqlite", content);
    expect_off(options, "index");
    std::ifstream file(options.folder + "/index.sqlite", std::ios::binary);
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), content);
    fs::remove_all(options.folder);
  }
}

TEST_F(TiersTest, ADamagedIndexBeginsAnew) {
  const std::vector<int32_t> text = random_ids(300);
  {
    DiskTier disk(disk_options());
    PrefixCache cache(runner_, cache_options(&disk));
    offer(cache, text);
  }
  const std::string path = folder_.file("cache/index.sqlite");
  ASSERT_GT(fs::file_size(path), 4096u);
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(100);
    file << std::string(200, '\x55');
  }
  folder_.write("cache/mine.snap", "not a file of the tier");
  folder_.write("cache/0000000000000009.snap.tmp-1234", "left by another life");
  for (const bool is_first : {true, false}) {
    DiskTier disk(disk_options());
    EXPECT_TRUE(disk.is_on());
    EXPECT_EQ(disk.stats().num_faults, is_first ? 1 : 0);
    PrefixCache cache(runner_, cache_options(&disk));
    std::vector<int32_t> longer = text;
    longer.push_back(1);
    EXPECT_EQ(found(cache, longer), is_first ? 0 : 300);
    if (is_first) offer(cache, text);
    disk.flush();
    EXPECT_EQ(payloads().size(), 3u) << "a state, a segment, and what is not ours";
  }
  EXPECT_FALSE(fs::exists(folder_.file("cache/0000000000000009.snap.tmp-1234")));
}

TEST_F(TiersTest, AQueueThatIsFullTakesNothing) {
  DiskTierOptions options = disk_options();
  options.queue_bytes = 100;
  DiskTier disk(options);
  PrefixCache cache(runner_, cache_options(&disk));
  offer(cache, random_ids(300));
  EXPECT_EQ(disk.stats().num_dropped, 1);
  EXPECT_EQ(disk.stats().num_snapshots, 0);
}

#ifdef TESSERA_TEST_SEAMS
// Whatever call fails, answers are right, no file is left that the index does not know, and the next life finds only
// what is whole.
TEST_F(TiersTest, FailingFileCallsCostHitsAlone) {
  const std::vector<std::vector<int32_t>> texts = {random_ids(700), random_ids(700), random_ids(700)};
  int64_t num_off = 0, num_faults = 0, num_hits = 0;
  for (int64_t nth = 1; nth <= 60; ++nth) {
    seams::fail_file_call(nth);
    for (int life = 0; life < 2; ++life) {
      DiskTierOptions options = disk_options();
      options.budget_bytes = 60'000;
      DiskTier disk(options);
      num_off += disk.is_on() ? 0 : 1;
      PrefixCache cache(runner_, cache_options(&disk, 4000));
      for (int i = 0; i < 6; ++i) {
        const std::vector<int32_t>& text = texts[rng_.below(3)];
        const std::vector<int32_t> beginning = first_of(text, 1 + static_cast<int64_t>(rng_.below(699)));
        found(cache, text);
        offer(cache, beginning);
        if (rng_.below(8) == 0) cache.forget({}, text);
      }
      disk.flush();
      if (disk.is_on()) {
        EXPECT_EQ(payloads().size(), static_cast<size_t>(disk.stats().num_snapshots + disk.stats().num_segments));
      }
      num_faults += disk.stats().num_faults, num_hits += disk.stats().num_hits;
    }
    seams::fail_file_call(0);
  }
  EXPECT_GT(num_off, 0);
  EXPECT_GT(num_faults, num_off);
  EXPECT_GT(num_hits, 0);
  EXPECT_EQ(runner_.num_pages(), 0);
  EXPECT_EQ(runner_.num_snapshots(), 0);
}
#endif

// A process that is killed at any moment leaves whole files, or ones that the next life removes. TESSERA_KILLS=1000 for
// more of them.
TEST_F(TiersTest, KilledProcessesLeaveOnlyWholeFiles) {
  const char* asked = std::getenv("TESSERA_KILLS");
  const int num_kills = asked == nullptr ? 30 : std::atoi(asked);
  const std::vector<std::vector<int32_t>> texts = {random_ids(2000), random_ids(2000), random_ids(2000)};
  int64_t num_hits = 0;
  for (int i = 0; i < num_kills; ++i) {
    const uint64_t seed = rng_.next_u64();
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      rng_ = Rng(seed);
      DiskTierOptions options = disk_options();
      options.budget_bytes = 120'000;
      DiskTier disk(options);
      PrefixCache cache(runner_, cache_options(&disk, 20'000));
      for (;;) {
        const std::vector<int32_t> beginning =
            first_of(texts[rng_.below(3)], 1 + static_cast<int64_t>(rng_.below(1999)));
        cache.offer({}, beginning, *run(beginning));
        disk.flush();
      }
    }
    // After so many files, or at once.
    for (uint64_t left = rng_.below(8); left > 0; --left) {
      for (const std::string last = newest(); newest() == last;) {
        ASSERT_EQ(::waitpid(child, nullptr, WNOHANG), 0) << "it ended by itself";
        std::this_thread::yield();
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(rng_.below(2000)));
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "it ended by itself";
    DiskTierOptions options = disk_options();
    options.budget_bytes = 120'000;
    DiskTier disk(options);
    ASSERT_TRUE(disk.is_on());
    PrefixCache cache(runner_, cache_options(&disk));
    for (const std::vector<int32_t>& text : texts) found(cache, text);
    disk.flush();
    EXPECT_EQ(disk.stats().num_faults, 0) << (log_->all().empty() ? "" : log_->all()[0]);
    EXPECT_EQ(payloads().size(), static_cast<size_t>(disk.stats().num_snapshots + disk.stats().num_segments));
    for (const auto& entry : fs::directory_iterator(folder_.file("cache"))) {
      EXPECT_EQ(entry.path().filename().string().find(".tmp-"), std::string::npos);
    }
    num_hits += disk.stats().num_hits;
  }
  EXPECT_GT(num_hits, 0);
}

}  // namespace
}  // namespace tessera::engine
