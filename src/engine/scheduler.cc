// SPDX-License-Identifier: Apache-2.0
#include "engine/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "base/error.h"

namespace tessera::engine {

namespace {

int64_t pending(const Scheduler::Entry& entry) {
  return entry.job.num_tokens - entry.num_done;
}

// One token to run and then one to draw: decoding, or a prompt's very last token.
bool is_decoding(const Scheduler::Entry& entry) {
  return pending(entry) == 1;
}

int64_t mixed_step_tokens(const Scheduler::Limits& limits) {
  return limits.max_mixed_step_tokens == 0 ? limits.max_step_tokens
                                           : std::min(limits.max_mixed_step_tokens, limits.max_step_tokens);
}

bool is_in(const std::vector<SequenceKey>& keys, SequenceKey key) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

bool is_kept_before(const Scheduler::Entry* a, const Scheduler::Entry* b) {
  const auto rank = [](const Scheduler::Entry& entry) {
    return std::tuple(entry.is_paused, entry.num_preempted < Scheduler::kMaxPreemptions, entry.job.priority,
                      entry.job.key);
  };
  return rank(*a) < rank(*b);
}

}  // namespace

int64_t Scheduler::most_running(const Limits& limits) {
  const int64_t mixed = mixed_step_tokens(limits), kept_for_prompts = std::max<int64_t>(1, mixed / 8);
  return std::max<int64_t>(1, std::min(limits.max_running, mixed - kept_for_prompts));
}

Scheduler::Scheduler(const Limits& limits, const CacheBudget& budget)
    : limits_{limits.max_step_tokens, most_running(limits), mixed_step_tokens(limits)},
      budget_(budget),
      granted_bytes_(budget.total_bytes()) {
  TESSERA_CHECK(limits.max_step_tokens > 0, "a step takes tokens");
  running_.reserve(static_cast<size_t>(limits_.max_running));  // from then on it takes no memory
}

Scheduler::Entry& Scheduler::at(SequenceKey key) {
  const auto found = entries_.find(key);
  TESSERA_CHECK(found != entries_.end(), fmt::format("sequence {} is not known", key));
  return found->second;
}

int64_t Scheduler::cost(const Entry& entry, int64_t num_tokens) const {
  return entry.job.num_copies * budget_.bytes(num_tokens, entry.job.capacity);
}

void Scheduler::charge(Entry& entry, int64_t num_tokens) {
  entry.num_reserved = num_tokens;
  used_bytes_ -= entry.charge;
  entry.charge = cost(entry, num_tokens);
  used_bytes_ += entry.charge;
}

// What the entry may come to take soon, beyond its charge.
int64_t Scheduler::headroom(const Entry& entry) const {
  return cost(entry, std::min(entry.num_reserved + kHeadroomTokens, entry.job.capacity)) - entry.charge;
}

bool Scheduler::fits(int64_t capacity, int64_t num_copies) const {
  const int64_t bytes = budget_.bytes(capacity, capacity);
  return num_copies <= limits_.max_running && (bytes == 0 || num_copies <= budget_.total_bytes() / bytes);
}

void Scheduler::enqueue(Entry& entry) {
  Flow& flow = flow_of(entry);
  if (flow.waiting.empty()) {
    // Time without anything waiting is no credit: level with the least served of those that wait.
    int64_t least = -1;
    for (auto it = flows_.lower_bound({entry.job.priority, 0});
         it != flows_.end() && it->first.first == entry.job.priority; ++it) {
      if (it->second.waiting.empty()) continue;
      least = least < 0 ? it->second.served_tokens : std::min(least, it->second.served_tokens);
    }
    flow.served_tokens = std::max(flow.served_tokens, least);
  }
  flow.waiting.insert(entry.job.key);
  eligible_.insert(entry.job.key);
}

void Scheduler::dequeue(Entry& entry) {
  flow_of(entry).waiting.erase(entry.job.key);
  eligible_.erase(entry.job.key);
}

void Scheduler::add(const Job& job) {
  TESSERA_CHECK(job.num_tokens > 0 && job.num_tokens <= job.capacity && job.num_copies > 0, "a job has tokens");
  TESSERA_CHECK(fits(job.capacity, job.num_copies), "a job fits when alone");
  const auto [place, is_added] = entries_.try_emplace(job.key, Entry{.job = job});
  TESSERA_CHECK(is_added, fmt::format("sequence {} is known already", job.key));
  // All of it or nothing, where memory ends.
  try {
    ++flows_[{job.priority, job.client}].num_live;
  } catch (...) {
    entries_.erase(place);
    throw;
  }
  try {
    enqueue(place->second);
  } catch (...) {
    remove(job.key);
    throw;
  }
  has_news_ = true;
}

void Scheduler::start(Entry& entry) {
  entry.phase = Phase::kRunning;
  running_.push_back(&entry);
}

void Scheduler::fork(SequenceKey parent, SequenceKey child) {
  Entry& from = at(parent);
  TESSERA_CHECK(from.phase == Phase::kRunning && from.job.num_copies > 1, "a fork was announced");
  const auto [place, is_added] = entries_.try_emplace(child, from);
  TESSERA_CHECK(is_added, fmt::format("sequence {} is known already", child));
  Entry& to = place->second;
  to.job.key = child;
  to.job.num_copies = 1;
  to.charge = from.charge / from.job.num_copies;
  from.charge -= to.charge;
  --from.job.num_copies;
  ++flow_of(to).num_live;
  start(to);
}

void Scheduler::remove(SequenceKey key) {
  Entry& entry = at(key);
  has_news_ = true;
  if (entry.phase == Phase::kRunning) {
    used_bytes_ -= entry.charge;
    num_running_ -= entry.job.num_copies;
    running_.erase(std::find(running_.begin(), running_.end(), &entry));
    granted_bytes_ = budget_.total_bytes();
  } else {
    dequeue(entry);
  }
  const FlowKey flow{entry.job.priority, entry.job.client};
  if (--flows_.at(flow).num_live == 0) flows_.erase(flow);
  entries_.erase(key);
}

void Scheduler::clear() {
  entries_.clear(), flows_.clear(), eligible_.clear(), running_.clear();
  used_bytes_ = num_running_ = 0;
  granted_bytes_ = budget_.total_bytes();
}

void Scheduler::set_paused(SequenceKey key, bool is_paused) {
  Entry& entry = at(key);
  if (entry.is_paused == is_paused) return;
  entry.is_paused = is_paused;
  has_news_ = true;
  if (entry.phase == Phase::kRunning) return;
  is_paused ? dequeue(entry) : enqueue(entry);
}

void Scheduler::ran(SequenceKey key, int64_t num_tokens) {
  Entry& entry = at(key);
  TESSERA_CHECK(entry.phase == Phase::kRunning && num_tokens <= pending(entry), "what ran was planned");
  entry.num_done += num_tokens;
}

void Scheduler::drew(SequenceKey key) {
  Entry& entry = at(key);
  TESSERA_CHECK(pending(entry) == 0 && entry.job.num_tokens < entry.job.capacity, "a token is drawn when all have run");
  ++entry.job.num_tokens;
  ++flow_of(entry).served_tokens;
}

void Scheduler::set_done(SequenceKey key, int64_t num_done) {
  Entry& entry = at(key);
  TESSERA_CHECK(num_done >= 0 && num_done < entry.job.num_tokens, "a token is left to run");
  entry.num_done = num_done;
}

void Scheduler::isolate(SequenceKey key, int64_t position) {
  set_done(key, 0);
  at(key).alone_until = position;
}

std::optional<SequenceKey> Scheduler::give_way() {
  if (running_.size() < 2) return std::nullopt;
  Entry& last = **std::max_element(running_.begin(), running_.end(), is_kept_before);
  put_back(last);
  has_news_ = true;
  granted_bytes_ = used_bytes_;
  return last.job.key;
}

void Scheduler::preempt(Entry& entry) {
  put_back(entry);
  plan_.preempted.push_back(entry.job.key);
}

void Scheduler::put_back(Entry& entry) {
  running_.erase(std::find(running_.begin(), running_.end(), &entry));
  used_bytes_ -= entry.charge;
  num_running_ -= entry.job.num_copies;
  entry.charge = entry.num_reserved = 0;
  entry.phase = Phase::kWaiting;
  ++entry.num_preempted;
  if (!entry.is_paused) enqueue(entry);
}

// Everything that runs has the bytes for all of its tokens, or is preempted.
void Scheduler::grow() {
  for (size_t i = 0; i < running_.size(); ++i) {
    Entry& entry = *running_[i];
    if (entry.is_paused || entry.job.num_tokens <= entry.num_reserved) continue;
    const int64_t more = cost(entry, entry.job.num_tokens) - entry.charge;
    // One alone may have all that there is.
    const auto is_too_much = [&] {
      return used_bytes_ + more > (running_.size() > 1 ? granted_bytes_ : budget_.total_bytes());
    };
    while (running_.size() > i && is_too_much()) preempt(*running_.back());
    if (running_.size() > i) charge(entry, entry.job.num_tokens);
  }
}

Scheduler::Entry& Scheduler::next_to_admit() {
  if ((num_admissions_ + 1) % kOldestEvery == 0) return at(*eligible_.begin());
  const std::pair<const FlowKey, Flow>* best = nullptr;
  for (const auto& candidate : flows_) {  // by priority
    if (candidate.second.waiting.empty()) continue;
    if (best != nullptr && candidate.first.first != best->first.first) break;
    const auto rank = [](const Flow& flow) { return std::tuple(flow.served_tokens, *flow.waiting.begin()); };
    if (best == nullptr || rank(candidate.second) < rank(best->second)) best = &candidate;
  }
  return at(*best->second.waiting.begin());
}

// Preempts, from the end of the keeping order, what a head may preempt, if that frees enough. Who just came in stays.
bool Scheduler::make_room(const Entry& head, int64_t missing_bytes) {
  std::vector<Entry*> victims;
  int64_t missing_places = num_running_ + head.job.num_copies - limits_.max_running;
  for (auto it = running_.rbegin(); it != running_.rend() && (missing_bytes > 0 || missing_places > 0); ++it) {
    const Entry& entry = **it;
    const bool is_lesser = entry.job.priority > head.job.priority && entry.num_preempted < kMaxPreemptions;
    if ((!entry.is_paused && !is_lesser) || is_in(plan_.admitted, entry.job.key)) continue;
    victims.push_back(*it);
    missing_bytes -= entry.charge + headroom(entry);
    missing_places -= entry.job.num_copies;
  }
  if (missing_bytes > 0 || missing_places > 0) return false;
  for (Entry* victim : victims) preempt(*victim);
  return true;
}

void Scheduler::admit() {
  while (!eligible_.empty()) {
    int64_t num_prompts = 0, kept_free = 0, left = limits_.max_mixed_step_tokens;
    for (const Entry* entry : running_) {
      kept_free += headroom(*entry);
      if (entry->is_paused) continue;
      is_decoding(*entry) ? --left : ++num_prompts;
    }
    if (num_prompts >= left) return;
    Entry& head = next_to_admit();
    if (is_in(plan_.preempted, head.job.key)) return;
    // Nothing is kept free where nothing runs: a head fits then.
    const int64_t total = running_.empty() ? budget_.total_bytes() : granted_bytes_;
    const int64_t missing = used_bytes_ + cost(head, head.job.num_tokens) + kept_free - total;
    const bool has_place = num_running_ + head.job.num_copies <= limits_.max_running;
    if ((missing > 0 || !has_place) && !make_room(head, missing)) return;
    dequeue(head);
    start(head);
    charge(head, head.job.num_tokens);
    num_running_ += head.job.num_copies;
    if (!head.has_begun) flow_of(head).served_tokens += head.job.num_tokens;
    head.has_begun = true;
    ++num_admissions_;
    plan_.admitted.push_back(head.job.key);
  }
}

// After a fault: the next of the sequences that must show whether it was theirs.
bool Scheduler::plan_alone() {
  for (const Entry* entry : running_) {
    if (entry->is_paused || entry->num_done >= entry->alone_until) continue;
    plan_.slices.push_back({entry->job.key, std::min(pending(*entry), limits_.max_mixed_step_tokens)});
    return true;
  }
  return false;
}

// Evenly, in this order where there are too few; what a short rest leaves goes to the others. What nobody takes is
// left.
int64_t Scheduler::share_out(std::span<Slice* const> slices, int64_t num_tokens) {
  for (bool is_full = slices.empty(); num_tokens > 0 && !is_full;) {
    is_full = true;
    const int64_t share = std::max<int64_t>(1, num_tokens / static_cast<int64_t>(slices.size()));
    for (Slice* slice : slices) {
      const int64_t more = std::min({share, num_tokens, pending(at(slice->key)) - slice->num_tokens});
      slice->num_tokens += more;
      num_tokens -= more;
      if (more > 0) is_full = false;
    }
  }
  return num_tokens;
}

void Scheduler::plan_slices() {
  std::vector<Slice> prompts;
  for (const Entry* entry : running_) {
    if (entry->is_paused) continue;
    if (is_decoding(*entry)) {
      plan_.slices.push_back({entry->job.key, 1});
    } else {
      prompts.push_back({entry->job.key, 0});
    }
  }
  const bool is_mixed = !plan_.slices.empty();
  const int64_t left =
      (is_mixed ? limits_.max_mixed_step_tokens : limits_.max_step_tokens) - static_cast<int64_t>(plan_.slices.size());
  // Half for all, those first that have the least left, so that no short prompt waits for long ones, however many there
  // are. Half for the first few, so that those end one after the other, not all at the end.
  std::vector<Slice*> shortest_first;
  for (Slice& prompt : prompts) shortest_first.push_back(&prompt);
  const std::vector<Slice*> in_order = shortest_first;
  std::stable_sort(shortest_first.begin(), shortest_first.end(),
                   [this](const Slice* a, const Slice* b) { return pending(at(a->key)) < pending(at(b->key)); });
  const int64_t for_all = left / 2, for_first = left - for_all;
  const int64_t not_taken = share_out(shortest_first, for_all);
  const std::span<Slice* const> first = std::span(in_order).first(std::min(kPrefillLanes, in_order.size()));
  share_out(shortest_first, share_out(first, for_first + not_taken));
  for (const Slice& prompt : prompts) {
    if (prompt.num_tokens > 0) plan_.slices.push_back(prompt);
  }
}

const Scheduler::Plan& Scheduler::plan() {
  plan_.preempted.clear(), plan_.admitted.clear(), plan_.slices.clear();
  if (!std::is_sorted(running_.begin(), running_.end(), is_kept_before)) {
    std::sort(running_.begin(), running_.end(), is_kept_before);
  }
  grow();
  if (plan_alone()) return plan_;
  admit();
  has_news_ = !plan_.preempted.empty();  // who waits behind them was not looked at
  num_ahead_ = 0;
  std::sort(running_.begin(), running_.end(), is_kept_before);
  if (!plan_alone()) plan_slices();
  return plan_;
}

int64_t Scheduler::grow_ahead() {
  if (has_news_ || (!eligible_.empty() && num_ahead_ >= kMostAhead)) return 0;
  int64_t count = 0, more = 0;
  for (const Entry* entry : running_) {
    if (entry->is_paused) continue;
    const int64_t next = entry->job.num_tokens + 1;
    if (!is_decoding(*entry) || entry->num_done < entry->alone_until || next >= entry->job.capacity) return 0;
    if (next > entry->num_reserved) more += cost(*entry, next) - entry->charge;
    ++count;
  }
  if (used_bytes_ + more > (running_.size() > 1 ? granted_bytes_ : budget_.total_bytes())) return 0;
  for (Entry* entry : running_) {
    const int64_t next = entry->job.num_tokens + 1;
    if (!entry->is_paused && next > entry->num_reserved) charge(*entry, next);
  }
  ++num_ahead_;
  return count;
}

void Scheduler::audit() const {
  int64_t bytes = 0, num_running = 0, num_eligible = 0, num_live = 0;
  size_t num_states = 0;
  for (const auto& [key, entry] : entries_) {
    const bool is_running = entry.phase == Phase::kRunning;
    bytes += entry.charge;
    if (is_running) num_running += entry.job.num_copies, ++num_states;
    const bool is_eligible = !is_running && !entry.is_paused;
    num_eligible += is_eligible ? 1 : 0;
    TESSERA_CHECK(is_eligible == (eligible_.count(key) == 1), fmt::format("queue of sequence {}", key));
    TESSERA_CHECK(entry.charge == (is_running ? cost(entry, entry.num_reserved) : 0), fmt::format("charge of {}", key));
    TESSERA_CHECK(entry.num_done <= entry.job.num_tokens, fmt::format("tokens of {}", key));
    TESSERA_CHECK(!is_running || entry.num_done <= entry.num_reserved, fmt::format("reserve of {}", key));
  }
  for (const auto& [key, flow] : flows_) num_live += flow.num_live;
  TESSERA_CHECK(bytes == used_bytes_ && bytes <= budget_.total_bytes(),
                fmt::format("{} bytes charged, {} counted, {} there are", bytes, used_bytes_, budget_.total_bytes()));
  TESSERA_CHECK(num_running == num_running_ && num_running <= limits_.max_running && num_states == running_.size(),
                fmt::format("{} running, {} counted, {} at most", num_running, num_running_, limits_.max_running));
  TESSERA_CHECK(num_eligible == static_cast<int64_t>(eligible_.size()), "queues");
  TESSERA_CHECK(num_live == static_cast<int64_t>(entries_.size()), "flows");
}

}  // namespace tessera::engine
