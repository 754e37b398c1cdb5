// SPDX-License-Identifier: Apache-2.0
#include "engine/simulation.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "engine/hash_runner.h"
#include "engine/host_tier.h"
#include "engine/prefix_cache.h"
#include "engine/step_loop.h"

namespace tessera::engine {

namespace {

constexpr int64_t kMaxPositions = 120;
constexpr double kSlowSeconds = 0.5;
constexpr size_t kTexts = 16;

class SimulatedClock final : public Clock {
 public:
  double now() const override { return time; }
  double time = 1;
};

// What the runner and the loop did, for the digest and for requests that fail without their fault.
uint64_t mixed(uint64_t digest, uint64_t value) {
  return hash_token(digest, static_cast<int64_t>(value >> 32), static_cast<int32_t>(value & 0x7FFFFFFF));
}

// A client of one request. It knows what each token must be, and takes them at its own pace.
class Consumer final : public Sink {
 public:
  Consumer(const Request& request, int64_t max_positions, bool has_poison)
      : request_(request), num_new_(capacity(max_positions) - length()), has_poison_(has_poison) {
    uint64_t context = 0;
    for (int64_t i = 0; i < length(); ++i) {
      context = hash_token(context, i, request.prompt[static_cast<size_t>(i)]);
      is_lost_ = is_lost_ || (has_poison && is_poisoned(context));
    }
    has_penalties_ = request.sampling.params.frequency_penalty != 0;
    Choice choice{.context = context};
    if (has_penalties_) {
      choice.counts.resize(kHashVocab);
      for (const int32_t id : request.prompt) ++choice.counts[static_cast<size_t>(id)];
    }
    choices_.assign(static_cast<size_t>(request.num_choices), choice);
  }

  // An exception would only end the request: what is wrong is kept for the world to find.
  void expect(bool is_right, const std::string& what) {
    if (!is_right && fault.empty()) fault = what;
  }
  int64_t room() const override { return held_limit_ - num_held_; }
  void begun(int64_t num_cached_tokens) override {
    expect(num_cached_ < 0 && num_scored_ == 0, "a request begins once, first of all");
    expect(num_cached_tokens < length() && (num_cached_tokens == 0 || !request_.prompt_logprobs),
           "what need not be run");
    num_cached_ = num_cached_tokens;
  }
  void prompt_logprobs(int64_t first_position, std::span<const Logprobs> logprobs) override {
    expect(request_.prompt_logprobs.has_value() && !is_over_, "nobody asked");
    expect(first_position == num_scored_ + 1, "prompt logprobs come in order, once");
    num_scored_ += static_cast<int64_t>(logprobs.size());
    for (const Logprobs& one : logprobs)
      expect(one.likeliest.size() == static_cast<size_t>(*request_.prompt_logprobs), "as many as asked");
  }
  bool token(const Token& token) override {
    Choice& choice = choices_.at(static_cast<size_t>(token.choice));
    expect(!is_over_ && choice.reason == FinishReason::kNone && !is_lost_, "no token after the end");
    expect(num_cached_ >= 0, "a request begins before its first token");
    if (token.choice == 0) said_.push_back(token.id);
    expect(num_held_ < held_limit_, "a token for which there is no room");
    expect(token.logprobs.has_value() == request_.logprobs.has_value(), "logprobs as asked");
    expect(!request_.prompt_logprobs || num_scored_ == length() - 1, "the prompt's logprobs come first");
    const int64_t position = length() + choice.num_tokens++;
    const uint64_t seed = request_.sampling.params.seed + static_cast<uint64_t>(token.choice);
    const int32_t expected =
        next_token(choice.context, seed, static_cast<uint64_t>(position), hash_counts(choice.counts));
    expect(token.id == expected, fmt::format("token {} at {}, alone it is {}", token.id, position, expected));
    if (has_penalties_) ++choice.counts[static_cast<size_t>(token.id)];
    choice.context = hash_token(choice.context, position, token.id);
    choice.last = token.id;
    if (held_limit_ != std::numeric_limits<int64_t>::max()) ++num_held_;
    digest = mixed(digest, static_cast<uint64_t>(token.id));
    return choice.num_tokens != stops_at;
  }
  void choice_finished(int index, FinishReason reason) override {
    Choice& choice = choices_.at(static_cast<size_t>(index));
    expect(choice.reason == FinishReason::kNone && reason != FinishReason::kNone, "a choice ends once");
    choice.reason = reason;
    if (reason == FinishReason::kCancelled || reason == FinishReason::kFailed) return;
    const bool is_end = choice.num_tokens > 0 && choice.last == kHashEnd && request_.stop_at_end_token;
    const bool is_stop = choice.num_tokens == stops_at ||
                         (choice.num_tokens > 0 && std::find(request_.stop_ids.begin(), request_.stop_ids.end(),
                                                             choice.last) != request_.stop_ids.end());
    const FinishReason expected = is_end    ? FinishReason::kEndOfText
                                  : is_stop ? FinishReason::kStop
                                            : FinishReason::kLength;
    expect(reason == expected, "the reason of an end");
    expect(reason != FinishReason::kLength || choice.num_tokens == num_new_, "all tokens that were asked for");
  }
  void finished(const Outcome& how) override {
    expect(!is_over_, "a request ends once");
    is_over_ = true;
    outcome = how;
    int64_t num_tokens = 0;
    for (size_t i = 0; i < choices_.size(); ++i) {
      expect(choices_[i].reason == how.reasons[i] && how.reasons[i] != FinishReason::kNone, "choices end first");
      num_tokens += choices_[i].num_tokens;
    }
    expect(num_tokens == how.num_generated_tokens, "tokens are counted");
    expect(how.num_cached_tokens == std::max<int64_t>(num_cached_, 0), "the outcome says what was known");
  }

  // A place where a step must throw: nothing of the request can be after it.
  bool has_met_poison() const {
    if (is_lost_) return true;
    return has_poison_ && std::any_of(choices_.begin(), choices_.end(),
                                      [](const Choice& choice) { return is_poisoned(choice.context); });
  }
  void hold_at_most(int64_t limit) { held_limit_ = limit; }
  void take(int64_t count) { num_held_ = std::max<int64_t>(0, num_held_ - count); }
  bool is_over() const { return is_over_; }
  int64_t length() const { return static_cast<int64_t>(request_.prompt.size()); }
  // The prompt and what its first choice was told.
  std::vector<int32_t> text() const {
    std::vector<int32_t> ids = request_.prompt;
    ids.insert(ids.end(), said_.begin(), said_.end());
    return ids;
  }

  int64_t stops_at = -1;    // answers "stop" to its n-th token
  int64_t taken_every = 0;  // of a slow one: a token every so many steps; 0: never
  bool is_slow = false;
  std::string fault;
  Outcome outcome;
  uint64_t digest = 0;

 private:
  struct Choice {
    uint64_t context = 0;
    int64_t num_tokens = 0;
    int32_t last = -1;
    FinishReason reason = FinishReason::kNone;
    std::vector<int32_t> counts{};
  };
  int64_t capacity(int64_t max_positions) const {
    return length() + std::min(request_.max_tokens, max_positions - length());
  }

  Request request_;
  int64_t num_new_;
  bool has_poison_, has_penalties_ = false, is_lost_ = false, is_over_ = false;
  std::vector<Choice> choices_;
  std::vector<int32_t> said_;
  int64_t num_cached_ = -1;  // before it has begun
  int64_t num_scored_ = 0, num_held_ = 0, held_limit_ = std::numeric_limits<int64_t>::max();
};

// Somebody waiting for a place, and what the contract's bound says of it.
struct Wait {
  int64_t since_admissions = 0;
  int64_t num_older = 0, num_older_preempted = 0;
};

class World {
 public:
  World(uint64_t seed, uint64_t number, int64_t num_requests)
      : rng_(seed, number),
        num_requests_(num_requests),
        has_tier_(number % 3 == 0),
        page_tokens_(has_tier_ ? int64_t{1} << rng_.below(5) : 1 + static_cast<int64_t>(rng_.below(16))),
        budget_(make_budget()),
        runner_(rng_.below(8) == 0 ? 1 + static_cast<int64_t>(rng_.below(8)) : 8 + static_cast<int64_t>(rng_.below(60)),
                kMaxPositions, *budget_, make_faults(), rng_.next_u64(),
                {.page_tokens = page_tokens_, .limit = page_limit()}),
        host_(static_cast<int64_t>((has_tier_ ? 100000 : 0) + rng_.below(100000))),
        prefixes_(runner_, {.budget_bytes = static_cast<int64_t>((has_tier_ ? 20000 : 0) + rng_.below(80000)),
                            .interval_tokens = 8 + static_cast<int64_t>(rng_.below(40)),
                            .least_gain_tokens = 1 + static_cast<int64_t>(rng_.below(8)),
                            .host = kDigestTokens % page_tokens_ == 0 ? &host_ : nullptr,
                            .least_load_tokens = 1 + static_cast<int64_t>(rng_.below(8))}),
        has_prefixes_(rng_.below(4) != 0 || has_tier_),
        room_({.max_requests = 4 + static_cast<int64_t>(rng_.below(60)),
               .max_tokens = 100 + static_cast<int64_t>(rng_.below(2000))}),
        max_mixed_(static_cast<int64_t>(rng_.below(80))),
        loop_(runner_, *budget_, room_, clock_,
              {.max_running = 1 + static_cast<int64_t>(rng_.below(40)),
               .max_mixed_step_tokens = max_mixed_,
               .swap_bytes = rng_.below(3) == 0 ? 0 : static_cast<int64_t>(rng_.below(20000)),
               .slow_consumer_seconds = kSlowSeconds,
               .prefixes = has_prefixes_ ? &prefixes_ : nullptr}),
        burst_(1 + rng_.below(12)),
        cancel_one_in_(20 + rng_.below(500)),
        slow_one_in_(rng_.below(3) == 0 ? 0 : 5 + rng_.below(100)) {
    runner_.set_runs_ahead(number % 4 != 1);
  }

  WorldReport run() {
    int64_t num_idle = 0;
    while (report_.num_requests < num_requests_ || !loop_.is_idle()) {
      arrive();
      cancel();
      const bool has_run = step();
      // Nothing runs only where nobody is there, or all who have begun wait for their consumers.
      num_idle = has_run ? 0 : num_idle + 1;
      TESSERA_CHECK(num_idle < 10000, "the loop stands still");
      if (!has_run) clock_.time += 0.01;
    }
    TESSERA_CHECK(loop_.scheduler().used_bytes() == 0 && loop_.swap_bytes() == 0, "the ledger is back at zero");
    TESSERA_CHECK(runner_.num_states() == 0 && runner_.held_bytes() == 0, "no state is left");
    report_.num_hits = loop_.totals().num_hits, report_.num_cached_tokens = loop_.totals().num_cached_tokens;
    report_.num_evicted = loop_.totals().num_snapshots_evicted;
    report_.num_from_host = host_.stats().num_hits;
    report_.num_short_steps = runner_.failed().no_pages;
    report_.num_ahead = runner_.num_ahead();
    while (prefixes_.give_up()) {
    }
    TESSERA_CHECK(runner_.num_snapshots() == 0 && runner_.num_pages() == 0 && prefixes_.stats().bytes == 0,
                  "pages and snapshots are back at zero");
    TESSERA_CHECK(room_.num_requests() == 0 && room_.num_tokens() == 0, "nobody waits");
    const Totals& totals = loop_.totals();
    TESSERA_CHECK(totals.num_requests == report_.num_requests &&
                      totals.num_completed + totals.num_cancelled + totals.num_failed == totals.num_requests,
                  "requests are counted");
    // Requests fail through their own fault, a call that failed for them, or a slow consumer: no others.
    const HashRunner::Failed& failed = runner_.failed();
    const int64_t num_refused_memory = failed.new_sequence + failed.fork;
    TESSERA_CHECK(has_prefixes_ ? num_out_of_memory_ <= num_refused_memory : num_out_of_memory_ == num_refused_memory,
                  "one request fails for each call that failed for it, unless prefixes made room");
    // A draw may also fail for a request that ends in the same step, before its turn.
    TESSERA_CHECK(num_unsampled_ <= failed.sample, "no request fails for a draw that did not");
    report_.num_completed = totals.num_completed, report_.num_cancelled = totals.num_cancelled;
    report_.num_failed = totals.num_failed;
    report_.num_steps = totals.num_steps, report_.num_tokens = totals.num_drawn;
    report_.num_swapped = totals.num_swapped, report_.num_recomputed = totals.num_recomputed;
    report_.num_failed_steps = totals.num_failed_steps;
    return report_;
  }

 private:
  std::unique_ptr<CacheBudget> make_budget() {
    const int64_t page = page_tokens_;
    const int64_t one = PagedBudget(page, 0).bytes(kMaxPositions, kMaxPositions);
    const int64_t total = one + static_cast<int64_t>(rng_.below(static_cast<uint64_t>(one) * 20));
    if (rng_.below(3) != 0) return std::make_unique<PagedBudget>(page, total);
    return std::make_unique<ReservedBudget>(
        model::CacheSpec{{{.name = "fixed", .entry_bytes = 40, .fixed_entries = 1},
                          {.name = "growing", .entry_bytes = 8 * page, .ratio = page}},
                         page},
        total);
  }

  // In some worlds there is less than the ledger says, but enough for the longest sequence.
  int64_t page_limit() {
    const int64_t needed = (kMaxPositions + page_tokens_ - 1) / page_tokens_;
    return rng_.below(3) == 0 ? needed + static_cast<int64_t>(rng_.below(4 * static_cast<uint64_t>(needed))) : 0;
  }

  HashRunner::Faults make_faults() {
    HashRunner::Faults faults;
    if (rng_.below(2) == 0)
      faults = {.step = 300,
                .new_sequence = 1000,
                .fork = 300,
                .save = 10,
                .restore = 10,
                .sample = 20000,
                .snapshot = 20,
                .resume = 20};
    runner_has_poison_ = faults.has_poison = rng_.below(2) == 0;
    return faults;
  }

  Request draw_request() {
    Request request;
    const uint64_t longest = rng_.below(10) == 0 ? kMaxPositions : 30;
    if (!texts_.empty() && rng_.below(2) == 0) {  // what was said, up to some place, and more
      request.prompt = texts_[rng_.below(texts_.size())];
      if (rng_.below(2) == 0) request.prompt.resize(1 + rng_.below(request.prompt.size()));
    }
    const size_t room = static_cast<size_t>(kMaxPositions) - request.prompt.size();
    for (uint64_t i = std::min(room, 1 + rng_.below(longest)); i > 0; --i)
      request.prompt.push_back(static_cast<int32_t>(rng_.below(kHashVocab)));
    for (size_t at = rng_.below(20); at < request.prompt.size() && rng_.below(5) != 0; at += 1 + rng_.below(20))
      request.boundaries.push_back(static_cast<int64_t>(at));
    if (rng_.below(8) == 0) request.cache_salt = "another";
    request.max_tokens = static_cast<int64_t>(rng_.below(rng_.below(10) == 0 ? 200 : 25));
    request.sampling.params.seed = rng_.next_u64();
    if (rng_.below(6) == 0) request.sampling.params.frequency_penalty = 1;
    if (rng_.below(8) == 0) request.num_choices = 1 + static_cast<int>(rng_.below(kMaxChoices));
    request.stop_at_end_token = rng_.below(8) != 0;
    if (rng_.below(8) == 0) request.stop_ids = {static_cast<int32_t>(rng_.below(kHashVocab))};
    if (rng_.below(16) == 0) request.logprobs = static_cast<int>(rng_.below(4));
    if (rng_.below(16) == 0) request.prompt_logprobs = static_cast<int>(rng_.below(3));
    request.client = rng_.below(2) == 0 ? 0 : rng_.below(20);  // one asks for half of everything
    const uint64_t priority = rng_.below(6);
    request.priority = priority == 0 ? Priority::kHigh : priority == 1 ? Priority::kLow : Priority::kNormal;
    return request;
  }

  void arrive() {
    if (rng_.below(16) == 0) is_busy_time_ = !is_busy_time_;
    const uint64_t count = is_busy_time_ ? rng_.below(burst_ + 1) : rng_.below(12) == 0;
    for (uint64_t i = 0; i < count && report_.num_requests < num_requests_; ++i) {
      const Request request = draw_request();
      const int64_t length = static_cast<int64_t>(request.prompt.size());
      if (loop_.find_refusal(request) || room_.enter(length)) {
        ++report_.num_refused;
        continue;
      }
      auto consumer = std::make_shared<Consumer>(request, kMaxPositions, runner_has_poison_);
      if (rng_.below(10) == 0) consumer->stops_at = 1 + static_cast<int64_t>(rng_.below(10));
      if (slow_one_in_ > 0 && rng_.below(slow_one_in_) == 0) {
        consumer->is_slow = true;
        consumer->hold_at_most(request.num_choices + static_cast<int64_t>(rng_.below(5)));
        consumer->taken_every = static_cast<int64_t>(rng_.below(6));
      }
      ++report_.num_requests;
      loop_.accept(++last_id_, request, consumer, clock_.time);
      consumers_.emplace(last_id_, std::move(consumer));
    }
    note_waiting();
  }

  void cancel() {
    while (!consumers_.empty() && rng_.below(cancel_one_in_) == 0) {
      auto it = consumers_.begin();
      std::advance(it, static_cast<int64_t>(rng_.below(consumers_.size())));
      loop_.cancel(it->first, "");
      TESSERA_CHECK(it->second->is_over() && it->second->outcome.reasons.back() != FinishReason::kNone, "cancelled");
      settle(it->first, *it->second);
      consumers_.erase(it);
    }
  }

  // Somebody who ran before the step ran one token in it, the last that was known. (A head whose prefix is found may
  // too.)
  bool has_decoded() const {
    const auto& now = loop_.scheduler().entries();
    return std::any_of(before_.begin(), before_.end(), [&](const auto& one) {
      const auto& [key, entry] = one;
      const auto found = now.find(key);
      return entry.phase == Scheduler::Phase::kRunning && entry.job.num_tokens - entry.num_done == 1 &&
             found != now.end() && found->second.num_done == entry.num_done + 1;
    });
  }

  bool step() {
    before_.clear();
    for (const auto& [key, entry] : loop_.scheduler().entries()) before_.emplace(key, entry);
    const int64_t failed_before = loop_.totals().num_failed_steps + runner_.failed().restore;
    const bool was_queued = loop_.is_ahead();
    const bool has_run = loop_.step();
    const StepStats& stats = loop_.last_step();
    clock_.time += 0.001 + 0.0001 * static_cast<double>(stats.num_prefill_tokens + stats.num_decode_tokens);
    loop_.audit();
    const int64_t charged = loop_.scheduler().used_bytes() + loop_.leaving_bytes();
    TESSERA_CHECK(runner_.held_bytes() <= charged, "what is held is charged");
    const PrefixStats kept = prefixes_.stats();
    if (num_changes_ != kept.num_kept + kept.num_evicted) prefixes_.audit();
    num_changes_ = kept.num_kept + kept.num_evicted;
    TESSERA_CHECK(runner_.num_snapshots() == prefixes_.stats().num_snapshots, "snapshots that exist can be found");
    const int64_t own = HashRunner::kSnapshotBytes * (runner_.num_states() + runner_.num_snapshots());
    const int64_t memory = runner_.num_pages() * page_tokens_ * HashRunner::kTokenBytes + own;
    TESSERA_CHECK(memory <= charged + prefixes_.stats().bytes, "all memory is in a budget");
    TESSERA_CHECK(stats.num_prefill_tokens + stats.num_decode_tokens <= runner_.max_step_tokens(), "tokens of a step");
    TESSERA_CHECK(!has_decoded() || max_mixed_ == 0 || stats.num_prefill_tokens + stats.num_decode_tokens <= max_mixed_,
                  "tokens of a step in which somebody decodes");
    compare(failed_before != loop_.totals().num_failed_steps + runner_.failed().restore, was_queued);
    int64_t num_waiting = 0, waiting_tokens = 0;
    for (const auto& [key, entry] : loop_.scheduler().entries()) {
      if (entry.has_begun) continue;
      ++num_waiting;
      waiting_tokens += entry.job.num_tokens;
    }
    TESSERA_CHECK(room_.num_requests() == num_waiting && room_.num_tokens() == waiting_tokens, "who waits is counted");
    settle_all();
    note_waiting();
    return has_run;
  }

  // What the step did to each sequence. A disturbed one threw, or lost a saved state. One that was queued already had
  // none whose consumers had no room.
  void compare(bool is_disturbed, bool was_queued) {
    const auto& after = loop_.scheduler().entries();
    bool is_lone = false;  // somebody shows whether a fault was its own
    for (const auto& [key, old] : before_) {
      is_lone = is_lone || (old.num_done < old.alone_until);
    }
    for (const auto& [key, entry] : after) is_lone = is_lone || entry.num_done < entry.alone_until;
    for (const auto& [key, old] : before_) {
      const auto found = after.find(key);
      if (found == after.end()) continue;
      const Scheduler::Entry& now = found->second;
      const bool is_preempted = now.num_preempted != old.num_preempted;
      if (is_preempted) {
        waits_.erase(key);  // it may have been admitted in this very step
        for (auto it = waits_.upper_bound(key); it != waits_.end(); ++it) ++it->second.num_older_preempted;
        continue;
      }
      const bool was_decoding = old.phase == Scheduler::Phase::kRunning && old.job.num_tokens - old.num_done == 1;
      const bool came_late = was_queued && old.is_paused;
      TESSERA_CHECK(
          !was_decoding || now.is_paused || came_late || is_disturbed || is_lone || now.num_done > old.num_done,
          fmt::format("sequence {} decodes in every step: {} of {} tokens, then {} of {}", key, old.num_done,
                      old.job.num_tokens, now.num_done, now.job.num_tokens));
    }
  }

  // The contract's bound on how many go before somebody who waits.
  void note_waiting() {
    const auto& entries = loop_.scheduler().entries();
    const int64_t admissions = loop_.scheduler().num_admissions();
    for (auto it = waits_.begin(); it != waits_.end();) {
      const auto found = entries.find(it->first);
      const Wait& wait = it->second;
      const int64_t bound = Scheduler::kOldestEvery * (wait.num_older + wait.num_older_preempted + 1);
      const int64_t passed = admissions - wait.since_admissions;
      const bool still_waits =
          found != entries.end() && found->second.phase == Scheduler::Phase::kWaiting && !found->second.is_paused;
      TESSERA_CHECK(!still_waits || passed <= bound, fmt::format("{} admissions passed, at most {}", passed, bound));
      if (still_waits)
        report_.most_of_wait_bound =
            std::max(report_.most_of_wait_bound, static_cast<double>(passed) / static_cast<double>(bound));
      it = still_waits ? std::next(it) : waits_.erase(it);
    }
    int64_t num_older = 0;
    for (const auto& [key, entry] : entries) {
      if (entry.phase == Scheduler::Phase::kWaiting && !entry.is_paused)
        waits_.try_emplace(key, Wait{.since_admissions = admissions, .num_older = num_older});
      ++num_older;
    }
  }

  void settle_all() {
    for (auto it = consumers_.begin(); it != consumers_.end();) {
      Consumer& consumer = *it->second;
      const bool takes =
          consumer.is_slow && consumer.taken_every > 0 && rng_.below(static_cast<uint64_t>(consumer.taken_every)) == 0;
      if (takes) consumer.take(1 + static_cast<int64_t>(rng_.below(3)));
      if (consumer.is_over()) settle(it->first, consumer);
      it = consumer.is_over() ? consumers_.erase(it) : std::next(it);
    }
    report_.num_pauses += loop_.last_step().num_paused;
  }

  void settle(RequestId id, const Consumer& consumer) {
    const Outcome& outcome = consumer.outcome;
    TESSERA_CHECK(consumer.fault.empty(), consumer.fault);
    const auto has = [&](FinishReason reason) {
      return std::find(outcome.reasons.begin(), outcome.reasons.end(), reason) != outcome.reasons.end();
    };
    report_.digest = mixed(mixed(report_.digest, id), consumer.digest);
    if (texts_.size() < kTexts) {
      texts_.push_back(consumer.text());
    } else {
      texts_[rng_.below(kTexts)] = consumer.text();
    }
    if (!has(FinishReason::kFailed)) {
      TESSERA_CHECK(has(FinishReason::kCancelled) || outcome.error.empty(), "no error without a failure");
      return;
    }
    if (outcome.error == "std::bad_alloc") {
      ++num_out_of_memory_;
    } else if (outcome.error_code == ErrorCode::kNotFinite && outcome.error != "a fault that stays") {
      ++num_unsampled_;
    } else if (outcome.error == "a fault that stays") {
      TESSERA_CHECK(consumer.has_met_poison(), "only the request at fault fails");
    } else {
      TESSERA_CHECK(consumer.is_slow && outcome.error_code == ErrorCode::kResourceExhausted, outcome.error);
      ++report_.num_too_slow;
    }
  }

  Rng rng_;
  const int64_t num_requests_;
  const bool has_tier_;  // a world made so that states come back from the host: pages divide blocks, and there is room
  SimulatedClock clock_;
  int64_t page_tokens_;
  std::unique_ptr<CacheBudget> budget_;
  bool runner_has_poison_ = false;
  HashRunner runner_;
  HostTier host_;
  PrefixCache prefixes_;
  const bool has_prefixes_;
  WaitingRoom room_;
  const int64_t max_mixed_;
  StepLoop loop_;
  uint64_t burst_, cancel_one_in_, slow_one_in_;
  bool is_busy_time_ = true;
  std::vector<std::vector<int32_t>> texts_;  // some of what was asked and told, for later prompts
  RequestId last_id_ = 0;
  std::map<RequestId, std::shared_ptr<Consumer>> consumers_;
  std::map<SequenceKey, Scheduler::Entry> before_;
  std::map<SequenceKey, Wait> waits_;
  int64_t num_changes_ = 0;  // of the prefix cache
  int64_t num_out_of_memory_ = 0, num_unsampled_ = 0;
  WorldReport report_;
};

}  // namespace

void WorldReport::add(const WorldReport& other) {
  num_requests += other.num_requests, num_refused += other.num_refused, num_completed += other.num_completed;
  num_cancelled += other.num_cancelled, num_failed += other.num_failed, num_too_slow += other.num_too_slow;
  num_steps += other.num_steps, num_tokens += other.num_tokens, num_swapped += other.num_swapped;
  num_recomputed += other.num_recomputed, num_failed_steps += other.num_failed_steps, num_pauses += other.num_pauses;
  num_short_steps += other.num_short_steps;
  num_ahead += other.num_ahead;
  num_hits += other.num_hits, num_cached_tokens += other.num_cached_tokens, num_evicted += other.num_evicted;
  num_from_host += other.num_from_host;
  most_of_wait_bound = std::max(most_of_wait_bound, other.most_of_wait_bound);
}

std::string WorldReport::to_string() const {
  return fmt::format(
      "{} requests ({} completed, {} cancelled, {} failed, of them {} too slow; {} refused), {} tokens in {} steps ({} "
      "queued behind another, {} failed, {} found too little memory), {} preemptions by swap and {} by recompute, {} "
      "pauses, {} prompts of which "
      "{} tokens were known, {} snapshots given up; the longest wait took {:.0f} % of its bound",
      num_requests, num_completed, num_cancelled, num_failed, num_too_slow, num_refused, num_tokens, num_steps,
      num_ahead, num_failed_steps, num_short_steps, num_swapped, num_recomputed, num_pauses, num_hits,
      num_cached_tokens, num_evicted, 100 * most_of_wait_bound);
}

WorldReport run_world(uint64_t seed, uint64_t number, int64_t num_requests) {
  return World(seed, number, num_requests).run();
}

}  // namespace tessera::engine
