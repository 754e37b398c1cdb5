// SPDX-License-Identifier: Apache-2.0
#include "model/sequence_snapshot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace tessera::model {

namespace {

// Before the block's bytes. Damage is for whoever stores it to find: here sizes are checked, and whose it is.
struct SavedHeader {
  char magic[8] = {'T', 'S', 'S', 'N', 'A', 'P', 'S', '1'};
  uint64_t fingerprint = 0;
  int64_t position = 0, draft_position = 0;
};
static_assert(sizeof(SavedHeader) == 32, "written as raw bytes");

constexpr const char* kSavedName = "saved snapshot";

}  // namespace

SequenceSnapshot::SequenceSnapshot(CachePool& pool, int64_t position, int64_t draft_position, size_t max_pages)
    : pool_(pool),
      position_(position),
      draft_position_(draft_position),
      block_(pool.snapshot_bytes(position, draft_position), pool.memory()) {
  pages_.reserve(max_pages);
}

SequenceSnapshot::~SequenceSnapshot() {
  for (const int32_t page : pages_) pool_.pages().release(page);
}

void SequenceSnapshot::share(int32_t page) {
  pages_.push_back(page);
  pool_.pages().share(page);
}

std::vector<uint8_t> SequenceSnapshot::save() const {
  SavedHeader header;
  header.fingerprint = pool_.layout().snapshot_fingerprint;
  header.position = position_, header.draft_position = draft_position_;
  std::vector<uint8_t> out(sizeof(header) + block_.size());
  std::memcpy(out.data(), &header, sizeof(header));
  if (block_.size() > 0) pool_.memory().download(out.data() + sizeof(header), block_.data(), block_.size());
  return out;
}

void SequenceSnapshot::save_page(size_t n, std::span<uint8_t> out) const {
  TESSERA_CHECK(n < pages_.size() && out.size() == static_cast<size_t>(pool_.pages().shape().bytes()),
                "a page's bytes");
  pool_.pages().download(pages_[n], out);
  pool_.clear_unfilled(out, std::min(kPageTokens, position_ - static_cast<int64_t>(n) * kPageTokens));
}

std::unique_ptr<SequenceSnapshot> SequenceSnapshot::restore(CachePool& pool, int64_t max_positions,
                                                            std::span<const uint8_t> saved,
                                                            std::span<const std::span<const uint8_t>> pages) {
  SavedHeader header;
  const SavedHeader expected;
  if (saved.size() < sizeof(header)) {
    fail_data(kSavedName, "size", fmt::format("at least {} bytes", sizeof(header)), fmt::format("{}", saved.size()));
  }
  std::memcpy(&header, saved.data(), sizeof(header));
  if (std::memcmp(header.magic, expected.magic, sizeof(header.magic)) != 0) {
    fail_data(kSavedName, "magic", "TSSNAPS1", "something else");
  }
  const uint64_t fingerprint = pool.layout().snapshot_fingerprint;
  if (header.fingerprint != fingerprint) {
    fail_data(kSavedName, "fingerprint", fmt::format("{:016x}, this model's", fingerprint),
              fmt::format("{:016x}", header.fingerprint));
  }
  if (header.position < 0 || header.position > max_positions || header.draft_position < 0 ||
      header.draft_position > header.position) {
    fail_data(kSavedName, "positions", fmt::format("0 <= draft <= position <= {}", max_positions),
              fmt::format("{}, {}", header.draft_position, header.position));
  }
  const std::span<const uint8_t> block = saved.subspan(sizeof(header));
  const size_t block_bytes = pool.snapshot_bytes(header.position, header.draft_position);
  if (block.size() != block_bytes) {
    fail_data(kSavedName, "size", fmt::format("{} bytes", block_bytes), fmt::format("{}", block.size()));
  }
  const size_t num_pages = static_cast<size_t>(pool.pages_for(header.position));
  const size_t page_bytes = static_cast<size_t>(pool.pages().shape().bytes());
  const bool has_pages = pages.size() == num_pages && std::all_of(pages.begin(), pages.end(), [&](const auto& page) {
                           return page.size() == page_bytes;
                         });
  if (!has_pages) {
    fail_data(kSavedName, "pages", fmt::format("{} of {} bytes", num_pages, page_bytes),
              fmt::format("{}", pages.size()));
  }
  auto snapshot = std::make_unique<SequenceSnapshot>(pool, header.position, header.draft_position, num_pages);
  pool.pages().reserve(static_cast<int64_t>(num_pages));
  for (const std::span<const uint8_t> page : pages) {
    snapshot->pages_.push_back(pool.pages().take());
    pool.pages().upload(snapshot->pages_.back(), page);
  }
  if (!block.empty()) pool.memory().upload(snapshot->block(), block.data(), block.size());
  return snapshot;
}

}  // namespace tessera::model
