// SPDX-License-Identifier: Apache-2.0
#include "engine/step_loop.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "engine/step_loop_parts.h"

namespace tessera::engine {

StepLoop::StepLoop(model::Runner& runner, const CacheBudget& budget, WaitingRoom& room, const Clock& clock,
                   const StepLoopOptions& options)
    : runner_(runner),
      budget_(budget),
      room_(room),
      clock_(clock),
      options_(options),
      scheduler_({.max_step_tokens = runner.max_step_tokens(),
                  .max_running = options.max_running,
                  .max_mixed_step_tokens = options.max_mixed_step_tokens},
                 budget) {}

StepLoop::~StepLoop() {
  drop_ahead();
}

std::optional<Refusal> StepLoop::find_refusal(const Request& request) const {
  if (std::optional<std::string> fault = find_fault(request, runner_.facts())) {
    return Refusal{.reason = Refusal::Reason::kFault, .message = std::move(*fault)};
  }
  const int64_t capacity = capacity_of(request, runner_.facts());
  if (scheduler_.fits(capacity, request.num_choices)) return std::nullopt;
  return Refusal{
      .reason = Refusal::Reason::kTooLarge,
      .message = fmt::format("{} choices of up to {} tokens take {} bytes each; the cache has {} and runs {} "
                             "sequences at most",
                             request.num_choices, capacity, budget_.bytes(capacity, capacity), budget_.total_bytes(),
                             scheduler_.max_running())};
}

void StepLoop::accept(RequestId id, Request request, std::shared_ptr<Sink> sink, double submitted) {
  ++totals_.num_requests;
  const int64_t num_prompt = static_cast<int64_t>(request.prompt.size());
  const std::shared_ptr<Sink> kept = sink;
  try {
    join(id, std::move(request), std::move(sink), submitted);
  } catch (const std::exception& error) {
    room_.leave(num_prompt);
    ++totals_.num_failed;
    tell_failure(*kept, code_of(error), error.what());
  }
}

// Of a request that has no outcome of its own. It needs no memory where there is none.
void StepLoop::tell_failure(Sink& sink, ErrorCode code, const char* error) noexcept {
  Outcome outcome;
  outcome.error_code = code;
  try {
    outcome.reasons = {FinishReason::kFailed};
    outcome.error = error;
  } catch (const std::exception&) {
    outcome.error = kOutOfMemory;
  }
  try {
    sink.finished(outcome);
  } catch (const std::exception&) {
    // The last call: nothing is left to end.
  }
}

void StepLoop::join(RequestId id, Request request, std::shared_ptr<Sink> sink, double submitted) {
  const int64_t capacity = capacity_of(request, runner_.facts());
  auto made = std::make_unique<Live>(
      Live{id, std::make_shared<const Request>(std::move(request)), std::move(sink), capacity, submitted});
  Live& live = *made;
  const Request& asked = live.request;
  live.num_open = asked.num_choices;
  live.outcome.reasons.assign(static_cast<size_t>(asked.num_choices), FinishReason::kNone);
  live.outcome.num_prompt_tokens = live.num_prompt();
  live.choices.reserve(static_cast<size_t>(asked.num_choices));
  const SequenceKey key = id * kKeysPerRequest;
  auto first = std::make_unique<Choice>(Choice{key, 0, asked.prompt, sampler_of(asked, 0, runner_.facts().vocab_size)});
  for (const int32_t token : asked.prompt) first->sampler.observe(token);
  if (asked.constraint != nullptr) first->constraint = asked.constraint->begin();
  live.choices.push_back(std::move(first));
  // Whole before anybody can find it, and gone again where the scheduler has no memory for it.
  const auto at = requests_.emplace(id, std::move(made)).first;
  try {
    scheduler_.add({.key = key,
                    .client = asked.client,
                    .priority = asked.priority,
                    .num_tokens = live.num_prompt(),
                    .capacity = capacity,
                    .num_copies = asked.num_choices});
  } catch (...) {
    requests_.erase(at);
    throw;
  }
}

StepLoop::Choice* StepLoop::find(SequenceKey key, Live*& live) const {
  const auto found = requests_.find(key / kKeysPerRequest);
  if (found == requests_.end()) return nullptr;
  live = found->second.get();
  const size_t index = static_cast<size_t>(key % kKeysPerRequest);
  if (index >= live->choices.size() || !live->choices[index]->is_open) return nullptr;
  return live->choices[index].get();
}

void StepLoop::cancel(RequestId id, const std::string& why) {
  const auto found = requests_.find(id);
  if (found != requests_.end()) end(*found->second, FinishReason::kCancelled, ErrorCode::kCancelled, why);
}

void StepLoop::cancel_all(const std::string& why) {
  while (!requests_.empty()) cancel(requests_.begin()->first, why);
}

void StepLoop::set_paused(Live& live, bool is_paused) {
  for (const auto& choice : live.choices) {
    if (choice->is_open) scheduler_.set_paused(choice->key, is_paused);
  }
}

void StepLoop::read_rooms(double now) {
  for (auto it = requests_.begin(); it != requests_.end();) {
    Live& live = *(it++)->second;
    if (!live.has_begun) continue;
    int64_t room = 0;
    try {
      room = live.sink->room();
    } catch (const std::exception& error) {
      end(live, FinishReason::kFailed, code_of(error), error.what());
      continue;
    }
    if (room >= live.num_open) {
      if (live.paused_since >= 0) set_paused(live, false);
      live.paused_since = -1;
    } else if (live.paused_since < 0) {
      live.paused_since = now;
      set_paused(live, true);
    } else if (now - live.paused_since >= options_.slow_consumer_seconds) {
      end(live, FinishReason::kFailed, ErrorCode::kResourceExhausted,
          fmt::format("its tokens were not taken for {} s", options_.slow_consumer_seconds));
    }
  }
}

double StepLoop::next_deadline() const {
  double deadline = std::numeric_limits<double>::infinity();
  for (const auto& [id, live] : requests_) {
    if (live->paused_since >= 0) deadline = std::min(deadline, live->paused_since + options_.slow_consumer_seconds);
  }
  return deadline;
}

void StepLoop::drop_saved(Choice& choice) {
  swap_bytes_ -= static_cast<int64_t>(choice.saved.size());
  choice.saved = {};
}

void StepLoop::preempt(SequenceKey key) {
  Live* live = nullptr;
  Choice* choice = find(key, live);
  TESSERA_CHECK(choice != nullptr, "preempted sequences live");
  ++live->outcome.num_preemptions;
  const int64_t position = choice->state == nullptr ? 0 : choice->state->position();
  if (position > 0 && swap_bytes_ + budget_.bytes(position, position) <= options_.swap_bytes) {
    try {
      choice->saved = choice->state->save();
    } catch (const std::exception&) {
      choice->saved = {};  // no memory for it: it is run again
    }
    swap_bytes_ += static_cast<int64_t>(choice->saved.size());
    if (swap_bytes_ > options_.swap_bytes) drop_saved(*choice);
  }
  choice->state.reset();
  if (choice->saved.empty()) scheduler_.set_done(key, 0);
  ++(choice->saved.empty() ? totals_.num_recomputed : totals_.num_swapped);
}

void StepLoop::begin(SequenceKey key, double now) {
  Live* live = nullptr;
  TESSERA_CHECK(find(key, live) != nullptr, "admitted sequences live");
  if (live->has_begun) return;
  live->has_begun = true;
  live->outcome.waited_seconds = now - live->submitted;
  room_.leave_begun(live->num_prompt(), now);
  totals_.num_prompt_tokens += live->num_prompt();
}

bool StepLoop::restore(Choice& choice) {
  if (choice.saved.empty()) return false;
  try {
    choice.state = make_with_room([&] { return runner_.restore(choice.saved); });
  } catch (const std::exception&) {
    scheduler_.set_done(choice.key, 0);  // the tokens are all there: they are run again
  }
  drop_saved(choice);
  return choice.state != nullptr;
}

// Memory is short: what is only kept for later goes before anything that runs suffers. False: nothing is kept.
bool StepLoop::give_up_prefix() {
  return options_.prefixes != nullptr && options_.prefixes->give_up();
}

// The sequence has a place and no state: the saved one, one that has seen a beginning, or an empty one.
void StepLoop::make_state(Live& live, Choice& choice) {
  if (restore(choice)) return;
  const bool needs_all_rows = live.request.prompt_logprobs && live.num_scored + 1 < live.num_prompt();
  // After a fault a sequence shows by itself whether it was its own, from its first token.
  const bool is_suspect = scheduler_.entries().at(choice.key).alone_until > 0;
  const bool looks_up = options_.prefixes != nullptr && !needs_all_rows && !is_suspect;
  if (looks_up) choice.state = options_.prefixes->find(live.request, choice.ids, live.capacity);
  const int64_t position = choice.state == nullptr ? 0 : choice.state->position();
  if (choice.state != nullptr) {
    TESSERA_CHECK(choice.state->capacity() >= live.capacity, "a prefix has room for the whole");
    scheduler_.set_done(choice.key, position);
  } else {
    choice.state = make_with_room([&] { return runner_.new_sequence(live.capacity); });
  }
  if (std::exchange(live.has_looked_up, true)) return;  // later it may find what it offered itself
  if (looks_up) {
    ++totals_.num_lookups;
    totals_.num_lookup_tokens += live.num_prompt();
    totals_.num_hits += position > 0 ? 1 : 0;
    totals_.num_cached_tokens += position;
  }
  live.outcome.num_cached_tokens = position;
  live.sink->begun(position);
}

// Before any slice is taken down: a failure here ends all choices of a request.
void StepLoop::make_state(SequenceKey key) {
  Live* live = nullptr;
  Choice* choice = find(key, live);
  if (choice == nullptr || choice->state != nullptr) return;
  try {
    make_state(*live, *choice);
  } catch (const std::exception& error) {
    end(*live, FinishReason::kFailed, code_of(error), error.what());
  }
}

void StepLoop::prepare(const Scheduler::Slice& slice) {
  Live* live = nullptr;
  Choice* choice = find(slice.key, live);
  if (choice == nullptr) return;  // its request failed just now
  try {
    prepare(*live, *choice, slice);
  } catch (const std::exception& error) {
    drop_slices(live->id);
    end(*live, FinishReason::kFailed, code_of(error), error.what());
  }
}

// What the step was to run of a request.
void StepLoop::drop_slices(RequestId id) {
  slices_.resize(std::min(slices_.size(), running_.size()));
  running_.resize(slices_.size());
  size_t kept = 0;
  for (size_t i = 0; i < running_.size(); ++i) {
    if (running_[i].key / kKeysPerRequest == id) continue;
    running_[kept] = running_[i];
    slices_[kept++] = slices_[i];
  }
  running_.resize(kept), slices_.resize(kept);
}

void StepLoop::prepare(Live& live, Choice& choice, const Scheduler::Slice& slice) {
  const int64_t first = choice.state->position(), known = static_cast<int64_t>(choice.ids.size());
  int64_t end = first + std::min(slice.num_tokens, known - first);
  const bool is_prompt = options_.prefixes != nullptr && first < live.num_prompt();
  if (is_prompt) end = std::min(end, std::max(first + 1, options_.prefixes->next_offer(live.request, first)));
  const int64_t count = end - first;
  const bool is_drawn = end == known && live.draws();
  const bool is_scored = live.request.prompt_logprobs && std::min(end, live.num_prompt() - 1) > live.num_scored;
  // After a prompt each choice draws from the same row.
  const bool is_drawn_once = is_drawn && (live.request.num_choices == 1 || known > live.num_prompt());
  model::Draw* draw = nullptr;
  const std::span<const uint32_t> shared = live.shared_mask(choice);
  const bool asks = choice.constraint != nullptr && shared.empty();
  const bool adds_mask = asks || (!shared.empty() && shared.data() != last_shared_mask_);
  const bool has_room = !adds_mask || num_masks_ < model::kMaxMasksPerStep;
  if (const auto one = is_drawn_once && has_room ? choice.sampler.draw_in_step(known) : std::nullopt) {
    if (asks) {
      ask_constraint(*choice.constraint, runner_.facts().vocab_size, choice.mask);
      num_masks_ += choice.mask.empty() ? 0 : 1;
    }
    draw = &draws_.emplace_back(*one);
    draw->mask = asks ? std::span<const uint32_t>(choice.mask) : shared;
    if (adds_mask && !asks) last_shared_mask_ = shared.data(), ++num_masks_;
  }
  const bool needs_row = is_drawn && (draw == nullptr || live.request.logprobs);
  const bool is_decode = end == known && count == 1 && known > live.num_prompt();
  running_.push_back({slice.key, first, count, end == known, is_decode,
                      is_scored   ? model::LogitRows::kAll
                      : needs_row ? model::LogitRows::kLast
                                  : model::LogitRows::kNone,
                      draw});
  const std::span<const int32_t> ids(choice.ids);
  slices_.push_back({choice.state.get(), ids.subspan(static_cast<size_t>(first), static_cast<size_t>(count)),
                     running_.back().rows, draw});
  (is_decode ? stats_.num_decode_tokens : stats_.num_prefill_tokens) += count;
}

// Of one that gives way to the others of the step.
void StepLoop::drop_slice(SequenceKey key) {
  const auto found =
      std::find_if(running_.begin(), running_.end(), [&](const Running& slice) { return slice.key == key; });
  if (found == running_.end()) return;
  (found->is_decode ? stats_.num_decode_tokens : stats_.num_prefill_tokens) -= found->count;
  --stats_.num_slices;
  slices_.erase(slices_.begin() + (found - running_.begin()));
  running_.erase(found);
}

// Memory is short, and nothing is kept that could go: who is to be kept last gives way. False: one alone runs.
bool StepLoop::give_way() {
  const std::optional<SequenceKey> last = scheduler_.give_way();
  if (!last) return false;
  preempt(*last);
  ++stats_.num_preempted;
  drop_slice(*last);
  return true;
}

// The step threw: no state that took part can be trusted.
void StepLoop::take_apart(const std::string& error, ErrorCode code) {
  stats_.has_failed = true;
  ++totals_.num_failed_steps;
  for (const Running& slice : running_) {
    Live* live = nullptr;
    Choice* choice = find(slice.key, live);
    if (choice == nullptr) continue;  // it ended before the step that was queued for it
    choice->state.reset();
    if (options_.prefixes != nullptr) {
      options_.prefixes->forget(live->request,
                                std::span(choice->ids).first(static_cast<size_t>(slice.first + slice.count)));
    }
    if (running_.size() == 1) return end(*live, FinishReason::kFailed, code, error);
    scheduler_.isolate(slice.key, slice.first + slice.count);
  }
}

void StepLoop::run(bool is_queued) {
  const double start = clock_.now();
  TensorView logits;
  for (bool has_run = false; !has_run;) {
    try {
      if (is_queued || runner_.can_run_ahead()) {
        if (!is_queued) runner_.queue_step(slices_);
        is_queued = true;
        queue_ahead();
        logits = runner_.finish_step();
      } else {
        logits = runner_.step(slices_);
      }
      has_run = true;
    } catch (const std::exception& error) {
      forget_ahead();
      part_with_leaving(false);
      // Where memory ends a step has done nothing, and may be tried again with less of it.
      const auto* ours = dynamic_cast<const Error*>(&error);
      const bool is_short = !is_queued && ours != nullptr && ours->code() == ErrorCode::kResourceExhausted;
      if (is_short && (give_up_prefix() || give_way())) {
        if (slices_.empty()) return;
        continue;
      }
      stats_.model_seconds = clock_.now() - start;
      return take_apart(error.what(), code_of(error));
    }
  }
  stats_.model_seconds = clock_.now() - start;
  part_with_leaving(true);
  deliver(logits);
}

void StepLoop::abandon(std::string_view why, ErrorCode code) noexcept {
  drop_ahead();
  for (auto& [id, live] : requests_) {
    if (!live->has_begun) room_.leave(live->num_prompt());
    live->outcome.error_code = code;
    try {
      live->outcome.error = why;
    } catch (const std::exception&) {
      live->outcome.error = kOutOfMemory;
    }
    try {
      for (FinishReason& reason : live->outcome.reasons) {
        if (reason == FinishReason::kNone) reason = FinishReason::kFailed;
      }
      live->sink->finished(live->outcome);
    } catch (const std::exception&) {
      // Nothing is left to end.
    }
  }
  totals_.num_failed += static_cast<int64_t>(requests_.size());
  requests_.clear();
  scheduler_.clear();
  swap_bytes_ = 0;
}

bool StepLoop::step() {
  stats_ = {};
  const double start = clock_.now();
  read_rooms(start);
  const bool is_queued = is_ahead_, has_work = is_queued || prepare_planned(start);
  if (is_queued) take_up_ahead();
  stats_.num_slices = static_cast<int64_t>(running_.size());
  if (!running_.empty()) run(is_queued);
  set_gauges();
  if (has_work) count(start);
  return has_work;
}

// False: the scheduler has nothing to run.
bool StepLoop::prepare_planned(double now) {
  running_.clear(), slices_.clear(), draws_.clear();
  num_masks_ = 0, last_shared_mask_ = nullptr;
  const Scheduler::Plan& plan = scheduler_.plan();
  for (const SequenceKey key : plan.preempted) preempt(key);
  for (const SequenceKey key : plan.admitted) begin(key, now);
  for (const Scheduler::Slice& slice : plan.slices) make_state(slice.key);
  for (const Scheduler::Slice& slice : plan.slices) prepare(slice);
  stats_.num_admitted = static_cast<int64_t>(plan.admitted.size());
  stats_.num_preempted = static_cast<int64_t>(plan.preempted.size());
  return !plan.slices.empty();
}

// How things are, also while nothing runs.
void StepLoop::set_gauges() {
  for (const auto& [id, live] : requests_) {
    stats_.num_waiting += live->has_begun ? 0 : 1;
    stats_.num_paused += live->paused_since >= 0 ? 1 : 0;
  }
  stats_.num_set_aside = scheduler_.num_waiting() - stats_.num_waiting;
  stats_.num_running = scheduler_.num_running();
  stats_.cache_bytes = scheduler_.used_bytes();
  stats_.cache_total_bytes = budget_.total_bytes();
  stats_.swap_bytes = swap_bytes_;
  if (options_.prefixes == nullptr) return;
  const PrefixStats prefixes = options_.prefixes->stats();
  stats_.num_snapshots = prefixes.num_snapshots;
  stats_.snapshot_bytes = prefixes.bytes, stats_.snapshot_total_bytes = prefixes.total_bytes;
  totals_.num_snapshots_kept = prefixes.num_kept, totals_.num_snapshots_evicted = prefixes.num_evicted;
}

void StepLoop::count(double start) {
  stats_.seconds = clock_.now() - start;
  ++totals_.num_steps;
  totals_.num_prefill_tokens += stats_.num_prefill_tokens;
  totals_.num_decode_tokens += stats_.num_decode_tokens;
  totals_.num_drawn += stats_.num_drawn;
  totals_.model_seconds += stats_.model_seconds;
  totals_.step_seconds += stats_.seconds;
  if (options_.observer != nullptr) options_.observer->step(stats_, totals_);
}

void StepLoop::audit() const {
  scheduler_.audit();
  int64_t saved_bytes = 0;
  size_t num_sequences = 0;
  for (const auto& [id, live] : requests_) {
    for (const auto& choice : live->choices) {
      if (!choice->is_open) continue;
      ++num_sequences;
      saved_bytes += static_cast<int64_t>(choice->saved.size());
      const Scheduler::Entry& entry = scheduler_.entries().at(choice->key);
      const bool is_waiting = entry.phase == Scheduler::Phase::kWaiting;
      TESSERA_CHECK(!is_waiting || choice->state == nullptr,
                    fmt::format("sequence {} waits without state", choice->key));
      const int64_t done = choice->state != nullptr ? choice->state->position() : entry.num_done;
      TESSERA_CHECK(done == entry.num_done && entry.job.num_tokens == static_cast<int64_t>(choice->ids.size()),
                    fmt::format("sequence {}: {} tokens seen, {} counted", choice->key, done, entry.num_done));
    }
  }
  TESSERA_CHECK(num_sequences == scheduler_.entries().size(), "the scheduler knows the sequences that live");
  TESSERA_CHECK(leaving_.empty() || is_ahead_, "who has ended leaves when nothing runs it");
  TESSERA_CHECK(scheduler_.used_bytes() + leaving_bytes() <= budget_.total_bytes(), "who is leaving is in the budget");
  TESSERA_CHECK(saved_bytes == swap_bytes_ && swap_bytes_ <= options_.swap_bytes,
                fmt::format("{} bytes swapped, {} counted, {} at most", saved_bytes, swap_bytes_, options_.swap_bytes));
}

}  // namespace tessera::engine
