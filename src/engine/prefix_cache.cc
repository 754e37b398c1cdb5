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

// What a snapshot may fail with: it is kept for later, so that it costs a hit and no request. A device that is lost
// says so in the next step.
bool costs_a_hit(const Error& error) {
  return error.code() == ErrorCode::kResourceExhausted || error.code() == ErrorCode::kDeviceError;
}

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
  TESSERA_CHECK(options.interval_tokens > 0 && options.least_gain_tokens > 0 && options.least_load_tokens > 0,
                "snapshots are some tokens apart");
  const bool has_tiers = options.host != nullptr || options.disk != nullptr;
  TESSERA_CHECK(!has_tiers || kDigestTokens % runner.cache_spec().page_tokens == 0, "a block has whole pages");
}

PrefixCache::~PrefixCache() = default;

PrefixCache::Place PrefixCache::longest(std::span<const PrefixDigest> digests, std::span<const int32_t> ids,
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
  for (PrefixTier* tier : {options_.host, options_.disk}) {
    if (tier != nullptr) tier->touch({entry->digests, entry->tail});
  }
}

std::unique_ptr<model::SequenceState> PrefixCache::find(const Request& request, std::span<const int32_t> ids,
                                                        int64_t capacity) {
  const bool has_tiers = options_.host != nullptr || options_.disk != nullptr;
  if (entries_.empty() && !has_tiers) return nullptr;
  const std::vector<PrefixDigest> digests = prefix_digests(request.cache_salt, ids);
  const int64_t most = static_cast<int64_t>(ids.size()) - 1;  // the last one's logits are wanted
  if (has_tiers) load({digests, ids}, most);
  for (;;) {
    const Place found = longest(digests, ids, most);
    if (found == entries_.end()) return nullptr;
    touch(found);
    try {
      return runner_.resume(*found->snapshot, capacity);
    } catch (const std::bad_alloc&) {
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kDeviceError) return nullptr;
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
  make_room(own_bytes);
  const PrefixKey key = prefix_key({digests, ids}, length);
  try {
    add(key, state.snapshot());
  } catch (const std::bad_alloc&) {
    return;
  } catch (const Error& error) {
    if (!costs_a_hit(error)) throw;
    return;
  }
  store(options_.disk, key, *entries_.back().snapshot);
  make_room(0);
}

void PrefixCache::make_room(int64_t bytes) {
  while (stats_.bytes + bytes > options_.budget_bytes && give_up()) {
  }
}

// Of those that the budget has room for: a longer one must not hide a shorter one.
void PrefixCache::load(const PrefixText& text, int64_t most) {
  const model::CacheSpec& spec = runner_.cache_spec();
  const int64_t for_pages = options_.budget_bytes - spec.snapshot_bytes;
  if (for_pages < 0) return;
  if (spec.page_bytes > 0) most = std::min(most, for_pages / spec.page_bytes * spec.page_tokens);
  constexpr int kMostTries = 4;  // where what was found turns out damaged, a shorter one may serve
  for (int i = 0; i < kMostTries; ++i) {
    const Place known = longest(text.digests, text.ids, most);
    int64_t best = (known == entries_.end() ? 0 : known->snapshot->position()) + options_.least_load_tokens - 1;
    PrefixTier* where = nullptr;
    for (PrefixTier* tier : {options_.host, options_.disk}) {
      const int64_t position = tier == nullptr ? 0 : tier->longest(text, most);
      if (position > best) best = position, where = tier;
    }
    if (where == nullptr || load(*where, prefix_key(text, best))) return;
  }
}

// False: another one may be tried.
bool PrefixCache::load(PrefixTier& tier, const PrefixKey& key) {
  const model::CacheSpec& spec = runner_.cache_spec();
  const int64_t bytes = spec.snapshot_bytes + ceil_div(key.position(), spec.page_tokens) * spec.page_bytes;
  try {
    const std::optional<SnapshotBytes> found = tier.load(key);
    if (!found) return false;
    std::vector<std::span<const uint8_t>> pages;
    const auto add_pages = [&](std::span<const uint8_t> part) {
      const size_t page_bytes = static_cast<size_t>(spec.page_bytes);
      for (; page_bytes > 0 && part.size() >= page_bytes; part = part.subspan(page_bytes)) {
        pages.push_back(part.first(page_bytes));
      }
    };
    for (const SharedBytes& segment : found->segments) add_pages(*segment);
    add_pages(*found->tail_pages);
    make_room(bytes);
    auto snapshot = runner_.restore_snapshot(*found->state, pages);
    if (snapshot->position() == key.position()) add(key, std::move(snapshot));
  } catch (const std::bad_alloc&) {
  } catch (const Error& error) {
    if (!costs_a_hit(error) && error.code() != ErrorCode::kDataLoss) throw;
  }
  return true;
}

// What of a snapshot the tier lacks goes there in bytes. Where memory does not suffice for them it does without.
void PrefixCache::store(PrefixTier* tier, const PrefixKey& key, const model::StateSnapshot& snapshot) {
  if (tier == nullptr || tier->has_state(key)) return;
  const model::CacheSpec& spec = runner_.cache_spec();
  const size_t page_bytes = static_cast<size_t>(spec.page_bytes), num_pages = snapshot.pages().size();
  const size_t pages_of_block = page_bytes == 0 ? 0 : static_cast<size_t>(kDigestTokens / spec.page_tokens);
  try {
    std::vector<bool> is_missing;
    int64_t bytes =
        spec.snapshot_bytes + static_cast<int64_t>((num_pages - key.num_blocks() * pages_of_block) * page_bytes);
    for (const PrefixDigest& digest : key.digests.subspan(1)) {
      is_missing.push_back(!tier->has_segment(digest));
      if (is_missing.back()) bytes += static_cast<int64_t>(pages_of_block * page_bytes);
    }
    if (!tier->has_room(bytes)) return;
    const auto save_pages = [&](size_t first, size_t count) {
      std::vector<uint8_t> out(count * page_bytes);
      for (size_t i = 0; i < count; ++i) {
        snapshot.save_page(first + i, std::span(out).subspan(i * page_bytes, page_bytes));
      }
      return std::make_shared<const std::vector<uint8_t>>(std::move(out));
    };
    SnapshotBytes saved;
    for (size_t i = 0; i < is_missing.size(); ++i) {
      saved.segments.push_back(is_missing[i] ? save_pages(i * pages_of_block, pages_of_block) : nullptr);
    }
    const size_t tail_begin = key.num_blocks() * pages_of_block;
    saved.tail_pages = save_pages(tail_begin, num_pages - tail_begin);
    saved.state = std::make_shared<const std::vector<uint8_t>>(snapshot.save());
    tier->put(key, std::move(saved));
  } catch (const std::bad_alloc&) {
  } catch (const Error& error) {
    if (!costs_a_hit(error)) throw;
  }
}

void PrefixCache::add(const PrefixKey& key, std::unique_ptr<model::StateSnapshot> snapshot) {
  entries_.push_back({{key.digests.begin(), key.digests.end()}, {key.tail.begin(), key.tail.end()}, nullptr});
  const Place entry = std::prev(entries_.end());
  const std::span<const int32_t> pages = snapshot->pages();
  try {
    for (const int32_t page : pages) pages_.try_emplace(page, 0);
    index_.emplace(entry->digests.back(), entry);
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
  const auto [first, end] = index_.equal_range(entry->digests.back());
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
  for (PrefixTier* tier : {options_.host, options_.disk}) {
    if (tier != nullptr) tier->forget({digests, ids});
  }
}

bool PrefixCache::give_up() {
  if (entries_.empty()) return false;
  const Entry& oldest = entries_.front();
  store(options_.host, {oldest.digests, oldest.tail}, *oldest.snapshot);
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
