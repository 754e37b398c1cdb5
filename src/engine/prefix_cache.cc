// SPDX-License-Identifier: Apache-2.0
#include "engine/prefix_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/integer_math.h"

namespace tessera::engine {

namespace {

bool begins_with(std::span<const int32_t> ids, const std::vector<int32_t>& beginning) {
  return beginning.size() <= ids.size() && std::equal(beginning.begin(), beginning.end(), ids.begin());
}

// What follows the first `num_blocks` blocks.
std::span<const int32_t> after_blocks(std::span<const int32_t> ids, size_t num_blocks) {
  return ids.subspan(num_blocks * static_cast<size_t>(kDigestTokens));
}

}  // namespace

PrefixCache::PrefixCache(model::Runner& runner, const PrefixCacheOptions& options)
    : runner_(runner), options_(options), stats_{.total_bytes = options.budget_bytes} {
  TESSERA_CHECK(options.interval_tokens > 0 && options.least_gain_tokens > 0, "snapshots are some tokens apart");
}

PrefixCache::~PrefixCache() = default;

PrefixCache::Place PrefixCache::longest(const std::vector<PrefixDigest>& digests, std::span<const int32_t> ids,
                                        int64_t most) {
  // A snapshot with more whole blocks is longer than any with fewer.
  for (size_t num_blocks = digests.size(); num_blocks-- > 0;) {
    Place best = entries_.end();
    const auto [first, end] = index_.equal_range(digests[num_blocks]);
    for (auto it = first; it != end; ++it) {
      const Entry& entry = *it->second;
      const bool is_better = best == entries_.end() || entry.tail.size() > best->tail.size();
      if (!is_better || entry.snapshot->position() > most) continue;
      if (begins_with(after_blocks(ids, num_blocks), entry.tail)) best = it->second;
    }
    if (best != entries_.end()) return best;
  }
  return entries_.end();
}

void PrefixCache::touch(Place entry) {
  entries_.splice(entries_.end(), entries_, entry);
}

std::unique_ptr<model::SequenceState> PrefixCache::find(const Request& request, std::span<const int32_t> ids,
                                                        int64_t capacity) {
  if (entries_.empty()) return nullptr;
  const std::vector<PrefixDigest> digests = prefix_digests(request.cache_salt, ids);
  const int64_t most = static_cast<int64_t>(ids.size()) - 1;  // the last one's logits are wanted
  for (;;) {
    const Place found = longest(digests, ids, most);
    if (found == entries_.end()) return nullptr;
    touch(found);
    try {
      return runner_.resume(*found->snapshot, capacity);
    } catch (const std::bad_alloc&) {
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kResourceExhausted) throw;
    }
    give_up();  // the one found goes last
  }
}

int64_t PrefixCache::next_offer(const Request& request, int64_t position) {
  const int64_t next = (position / options_.interval_tokens + 1) * options_.interval_tokens;
  int64_t last = 0;
  for (const int64_t boundary : request.boundaries) {
    if (boundary - last < options_.least_gain_tokens) continue;
    last = boundary;
    if (boundary > position) return std::min(boundary, next);
  }
  return next;
}

void PrefixCache::offer(const Request& request, std::span<const int32_t> ids, const model::SequenceState& state) {
  const int64_t length = static_cast<int64_t>(ids.size()), own_bytes = runner_.cache_spec().snapshot_bytes;
  const model::CacheSpec& spec = runner_.cache_spec();
  const int64_t alone_bytes = own_bytes + ceil_div(length, spec.page_tokens) * spec.page_bytes;
  if (length < options_.least_gain_tokens || alone_bytes > options_.budget_bytes) return;
  const std::vector<PrefixDigest> digests = prefix_digests(request.cache_salt, ids);
  const Place known = longest(digests, ids, length);
  if (known != entries_.end()) {
    touch(known);
    if (length - known->snapshot->position() < options_.least_gain_tokens) return;
  }
  // Before it is taken there is room for what nobody else has paid for; the sequence has paid for the pages.
  while (stats_.bytes + own_bytes > options_.budget_bytes && give_up()) {
  }
  try {
    add(digests.back(), after_blocks(ids, digests.size() - 1), state.snapshot());
  } catch (const std::bad_alloc&) {
    return;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kResourceExhausted) throw;
    return;
  }
  while (stats_.bytes > options_.budget_bytes && give_up()) {
  }
}

void PrefixCache::add(const PrefixDigest& blocks, std::span<const int32_t> tail,
                      std::unique_ptr<model::StateSnapshot> snapshot) {
  entries_.push_back({blocks, {tail.begin(), tail.end()}, nullptr});
  const Place entry = std::prev(entries_.end());
  const std::span<const int32_t> pages = snapshot->pages();
  try {
    for (const int32_t page : pages) pages_.try_emplace(page, 0);
    index_.emplace(blocks, entry);
  } catch (...) {
    std::erase_if(pages_, [](const auto& page) { return page.second == 0; });
    entries_.erase(entry);
    throw;
  }
  entry->snapshot = std::move(snapshot);
  stats_.bytes += entry->snapshot->own_bytes();
  for (const int32_t page : pages) {
    if (pages_.at(page)++ == 0) stats_.bytes += runner_.cache_spec().page_bytes;
  }
  ++stats_.num_kept, ++stats_.num_snapshots;
}

void PrefixCache::drop(Place entry) {
  stats_.bytes -= entry->snapshot->own_bytes();
  for (const int32_t page : entry->snapshot->pages()) {
    const auto found = pages_.find(page);
    if (--found->second > 0) continue;
    pages_.erase(found);
    stats_.bytes -= runner_.cache_spec().page_bytes;
  }
  const auto [first, end] = index_.equal_range(entry->blocks);
  index_.erase(std::find_if(first, end, [&](const auto& one) { return one.second == entry; }));
  entries_.erase(entry);
  ++stats_.num_evicted, --stats_.num_snapshots;
}

void PrefixCache::forget(const Request& request, std::span<const int32_t> ids) {
  const std::vector<PrefixDigest> digests = prefix_digests(request.cache_salt, ids);
  const int64_t length = static_cast<int64_t>(ids.size());
  for (Place found = longest(digests, ids, length); found != entries_.end(); found = longest(digests, ids, length)) {
    drop(found);
  }
}

bool PrefixCache::give_up() {
  if (entries_.empty()) return false;
  drop(entries_.begin());
  return true;
}

void PrefixCache::audit() const {
  std::unordered_map<int32_t, int64_t> pages;
  int64_t bytes = 0;
  for (const Entry& entry : entries_) {
    bytes += entry.snapshot->own_bytes();
    for (const int32_t page : entry.snapshot->pages()) ++pages[page];
    TESSERA_CHECK(entry.snapshot->own_bytes() <= runner_.cache_spec().snapshot_bytes, "a snapshot's own memory");
  }
  bytes += static_cast<int64_t>(pages.size()) * runner_.cache_spec().page_bytes;
  TESSERA_CHECK(pages == pages_, "pages of the snapshots");
  TESSERA_CHECK(
      bytes == stats_.bytes && bytes <= options_.budget_bytes,
      fmt::format("snapshots take {} bytes, {} counted, {} at most", bytes, stats_.bytes, options_.budget_bytes));
  TESSERA_CHECK(static_cast<int64_t>(entries_.size()) == stats_.num_snapshots && index_.size() == entries_.size() &&
                    stats_.num_kept - stats_.num_evicted == stats_.num_snapshots,
                "snapshots are counted");
}

}  // namespace tessera::engine
