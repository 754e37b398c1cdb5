// SPDX-License-Identifier: Apache-2.0
#include "engine/hash_runner.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <new>

#include "base/error.h"

namespace tessera::engine {

namespace {

constexpr uint64_t kRowBits = 48;  // of a context that its row of logits tells, 24 in each of two numbers

uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t x = (a ^ (b + 0x9E3779B97F4A7C15 + (a << 6) + (a >> 2))) * 0xBF58476D1CE4E5B9;
  x ^= x >> 29;
  x *= 0x94D049BB133111EB;
  return x ^ (x >> 32);
}

}  // namespace

uint64_t hash_token(uint64_t context, int64_t position, int32_t id) {
  return mix(mix(context, static_cast<uint64_t>(position)), static_cast<uint64_t>(id) + 1);
}

bool is_poisoned(uint64_t context) {
  return (context >> 52) == 5;
}

int32_t next_token(uint64_t context, uint64_t seed, uint64_t position, uint64_t counts) {
  const uint64_t seen = context & ((uint64_t{1} << kRowBits) - 1);
  return static_cast<int32_t>(mix(mix(mix(seen, seed), position), counts) % kHashVocab);
}

int32_t masked_token(int32_t id, std::span<const uint32_t> mask) {
  for (int32_t i = 0; i < kHashVocab && !mask.empty(); ++i) {
    const int32_t at = (id + i) % kHashVocab;
    if ((mask[0] >> at & 1) != 0) return at;
  }
  return mask.empty() ? id : -1;
}

uint64_t hash_counts(std::span<const int32_t> counts) {
  uint64_t hash = 0;
  for (const int32_t count : counts) hash = mix(hash, static_cast<uint64_t>(count));
  return hash;
}

namespace {

// In turn for want of memory and for the device's sake.
[[noreturn]] void throw_either(int64_t num_failed) {
  if (num_failed % 2 == 0) throw std::bad_alloc();
  fail(ErrorCode::kDeviceError, "the device fails");
}

}  // namespace

class HashRunner::State final : public model::SequenceState {
 public:
  State(HashRunner& runner, int64_t capacity) : runner_(runner), capacity_(capacity) { runner_.states_.insert(this); }
  ~State() override {
    runner_.states_.erase(this);
    for (const Queued& step : runner_.queued_) {
      for (const model::SequenceSlice& slice : step.slices) runner_.has_lost_queued_ |= slice.state == this;
    }
  }
  int64_t position() const override { return at; }
  int64_t capacity() const override { return capacity_; }
  std::unique_ptr<model::SequenceState> fork() const override {
    runner_.expect_nothing_queued();
    if (runner_.fails(runner_.faults_.fork, runner_.failed_.fork)) throw std::bad_alloc();
    auto copy = std::make_unique<State>(runner_, capacity_);
    copy->at = at, copy->context = context, copy->pages = pages, copy->marks = marks;
    return copy;
  }
  std::unique_ptr<model::StateSnapshot> snapshot() const override;
  std::unique_ptr<model::StateMark> mark() const override { return nullptr; }
  void rollback(const model::StateMark&) override {}
  std::vector<uint8_t> save() const override {
    runner_.expect_nothing_queued();
    if (runner_.fails(runner_.faults_.save, runner_.failed_.save)) throw std::bad_alloc();
    const uint64_t values[] = {static_cast<uint64_t>(capacity_), static_cast<uint64_t>(at), context};
    // As long as a model's would be.
    std::vector<uint8_t> bytes(static_cast<size_t>(runner_.budget_.bytes(at, at)));
    std::memcpy(bytes.data(), values, sizeof(values));
    TESSERA_CHECK(sizeof(values) + marks.size() * sizeof(uint64_t) <= bytes.size(), "room for what pages hold");
    if (!marks.empty()) std::memcpy(bytes.data() + sizeof(values), marks.data(), marks.size() * sizeof(uint64_t));
    return bytes;
  }

  int64_t at = 0;
  uint64_t context = 0;
  std::vector<Page> pages;
  std::vector<uint64_t> marks;  // what each page holds: the context after its last token

 private:
  HashRunner& runner_;
  int64_t capacity_;
};

class HashRunner::Snapshot final : public model::StateSnapshot {
 public:
  Snapshot(HashRunner& runner, const State& state)
      : at(state.at), context(state.context), marks(state.marks), pages_(state.pages), runner_(runner) {
    for (const Page& page : pages_) numbers_.push_back(*page);
    ++runner.num_snapshots_;
  }
  ~Snapshot() override { --runner_.num_snapshots_; }
  int64_t position() const override { return at; }
  int64_t own_bytes() const override { return kSnapshotBytes; }
  std::span<const int32_t> pages() const override { return numbers_; }
  const std::vector<Page>& held() const { return pages_; }
  std::vector<uint8_t> save() const override {
    runner_.expect_nothing_queued();
    if (runner_.fails(runner_.faults_.save, runner_.failed_.save)) throw_either(runner_.failed_.save);
    std::vector<uint8_t> bytes(kSnapshotBytes);
    const uint64_t values[] = {static_cast<uint64_t>(at), context, hash_of(marks)};
    std::memcpy(bytes.data(), values, sizeof(values));
    return bytes;
  }
  void save_page(size_t n, std::span<uint8_t> out) const override {
    TESSERA_CHECK(n < marks.size() && static_cast<int64_t>(out.size()) == runner_.spec_.page_bytes, "a page");
    std::fill(out.begin(), out.end(), uint8_t{0});
    std::memcpy(out.data(), &marks[n], sizeof(marks[n]));
  }
  static uint64_t hash_of(const std::vector<uint64_t>& marks) {
    uint64_t hash = 1;
    for (const uint64_t mark : marks) hash = mix(hash, mark);
    return hash;
  }

  const int64_t at;
  const uint64_t context;
  const std::vector<uint64_t> marks;

 private:
  const std::vector<Page> pages_;
  std::vector<int32_t> numbers_;
  HashRunner& runner_;
};

std::unique_ptr<model::StateSnapshot> HashRunner::State::snapshot() const {
  runner_.expect_nothing_queued();
  if (runner_.fails(runner_.faults_.snapshot, runner_.failed_.snapshot)) throw_either(runner_.failed_.snapshot);
  return std::make_unique<Snapshot>(runner_, *this);
}

HashRunner::HashRunner(int64_t max_step_tokens, int64_t max_positions, const CacheBudget& budget, const Faults& faults,
                       uint64_t seed, const Pages& pages)
    : max_step_tokens_(max_step_tokens), budget_(budget), faults_(faults), rng_(seed), pages_(pages) {
  spec_.page_tokens = pages.page_tokens;
  spec_.page_bytes = kTokenBytes * pages.page_tokens;
  spec_.snapshot_bytes = kSnapshotBytes;
  facts_.vocab_size = kHashVocab;
  facts_.max_positions = max_positions;
  facts_.eos_ids = {kHashEnd};
}

HashRunner::~HashRunner() = default;

bool HashRunner::fails(uint64_t one_in, int64_t& count) {
  if (one_in == 0 || rng_.below(one_in) != 0) return false;
  ++count;
  return true;
}

int64_t HashRunner::held_bytes() const {
  int64_t bytes = 0;
  for (const State* state : states_) bytes += budget_.bytes(state->position(), state->capacity());
  return bytes;
}

HashRunner::Page HashRunner::take_page() {
  if (free_pages_.empty()) free_pages_.push_back(static_cast<int32_t>(num_pages_));
  const int32_t number = free_pages_.back();
  free_pages_.pop_back();
  ++num_pages_;
  return {new int32_t(number), [this](const int32_t* page) {
            free_pages_.push_back(*page);
            --num_pages_;
            delete page;
          }};
}

// For all slices or for none, as a model does.
void HashRunner::give_pages(std::span<const model::SequenceSlice> slices) {
  std::map<int32_t, std::pair<int64_t, int64_t>> written;  // shared pages: who writes, and owners
  int64_t missing = 0;
  const auto visit = [&](State& state, size_t num_tokens, const auto& shared, const auto& fresh) {
    const int64_t page = pages_.page_tokens;
    const size_t end = static_cast<size_t>((state.at + static_cast<int64_t>(num_tokens) + page - 1) / page);
    for (size_t n = static_cast<size_t>(state.at / page); n < std::min(end, state.pages.size()); ++n) {
      if (state.pages[n].use_count() > 1) shared(state.pages[n]);
    }
    for (size_t n = state.pages.size(); n < end; ++n) fresh();
  };
  for (const model::SequenceSlice& slice : slices) {
    const auto count = [&](const Page& page) { ++written.try_emplace(*page, 0, page.use_count()).first->second.first; };
    visit(dynamic_cast<State&>(*slice.state), slice.ids.size(), count, [&] { ++missing; });
  }
  for (const auto& [number, uses] : written) missing += std::min(uses.first, uses.second - 1);
  if (pages_.limit > 0 && num_pages() + missing > pages_.limit) {
    ++failed_.no_pages;
    fail(ErrorCode::kResourceExhausted, "no pages are left");
  }
  for (const model::SequenceSlice& slice : slices) {
    State& state = dynamic_cast<State&>(*slice.state);
    visit(
        state, slice.ids.size(), [&](Page& page) { page = take_page(); }, [&] { state.pages.push_back(take_page()); });
  }
  TESSERA_CHECK(pages_.limit == 0 || num_pages() <= pages_.limit, "pages are counted before they are taken");
}

std::unique_ptr<model::SequenceState> HashRunner::resume(const model::StateSnapshot& snapshot, int64_t capacity) {
  expect_nothing_queued();
  if (fails(faults_.resume, failed_.resume)) throw_either(failed_.resume);
  const Snapshot& from = dynamic_cast<const Snapshot&>(snapshot);
  TESSERA_CHECK(from.at <= capacity && capacity <= facts_.max_positions, "capacity");
  auto state = std::make_unique<State>(*this, capacity);
  state->at = from.at, state->context = from.context, state->pages = from.held(), state->marks = from.marks;
  return state;
}

// Pages of another text, or in another order, are a broken promise of whoever kept them.
std::unique_ptr<model::StateSnapshot> HashRunner::restore_snapshot(std::span<const uint8_t> saved,
                                                                   std::span<const std::span<const uint8_t>> pages) {
  expect_nothing_queued();
  if (fails(faults_.restore, failed_.restore)) throw_either(failed_.restore);
  uint64_t values[3];
  TESSERA_CHECK(saved.size() == kSnapshotBytes, "a saved snapshot");
  std::memcpy(values, saved.data(), sizeof(values));
  State state(*this, static_cast<int64_t>(values[0]));
  const std::vector<int32_t> ids(values[0]);
  const model::SequenceSlice all{.state = &state, .ids = ids};
  try {
    give_pages({&all, 1});
  } catch (const Error&) {
    ++failed_.restore;
    throw;
  }
  state.at = static_cast<int64_t>(values[0]), state.context = values[1];
  for (const std::span<const uint8_t> page : pages) {
    TESSERA_CHECK(static_cast<int64_t>(page.size()) == spec_.page_bytes, "a saved page");
    std::memcpy(&state.marks.emplace_back(), page.data(), sizeof(uint64_t));
  }
  TESSERA_CHECK(state.marks.size() == state.pages.size() && Snapshot::hash_of(state.marks) == values[2],
                "pages belong to their snapshot");
  return std::make_unique<Snapshot>(*this, state);
}

std::unique_ptr<model::SequenceState> HashRunner::new_sequence(int64_t capacity) {
  expect_nothing_queued();
  if (fails(faults_.new_sequence, failed_.new_sequence)) throw std::bad_alloc();
  TESSERA_CHECK(capacity <= facts_.max_positions, "capacity");
  return std::make_unique<State>(*this, capacity);
}

std::unique_ptr<model::SequenceState> HashRunner::restore(std::span<const uint8_t> bytes) {
  expect_nothing_queued();
  if (fails(faults_.restore, failed_.restore)) fail(ErrorCode::kDataLoss, "damaged");
  uint64_t values[3];
  std::memcpy(values, bytes.data(), sizeof(values));
  auto state = std::make_unique<State>(*this, static_cast<int64_t>(values[0]));
  const std::vector<int32_t> ids(values[1]);
  const model::SequenceSlice all{.state = state.get(), .ids = ids};
  try {
    give_pages({&all, 1});
  } catch (const Error&) {
    ++failed_.restore;
    throw;
  }
  state->at = static_cast<int64_t>(values[1]), state->context = values[2];
  state->marks.resize(state->pages.size());
  if (!state->marks.empty()) {
    std::memcpy(state->marks.data(), bytes.data() + sizeof(values), state->marks.size() * sizeof(uint64_t));
  }
  return state;
}

void HashRunner::see(State& state, int32_t id) const {
  state.context = hash_token(state.context, state.at, id);
  state.marks.resize(static_cast<size_t>(state.at++ / pages_.page_tokens) + 1);
  state.marks.back() = state.context;
}

void HashRunner::expect_nothing_queued() const {
  TESSERA_CHECK(queued_.empty(), "nothing but the next step while one is queued");
}

TensorView HashRunner::step(std::span<const model::SequenceSlice> slices) {
  expect_nothing_queued();
  give_pages(slices);
  return compute(slices);
}

void HashRunner::queue_step(std::span<const model::SequenceSlice> slices) {
  expect_nothing_queued();
  give_pages(slices);
  Queued& step = queued_.emplace_back();
  step.slices.assign(slices.begin(), slices.end());
  for (const model::SequenceSlice& slice : slices) step.ids.emplace_back(slice.ids.begin(), slice.ids.end());
}

bool HashRunner::queue_next(std::span<model::Draw* const> draws) {
  TESSERA_CHECK(queued_.size() == 1 && draws.size() == queued_[0].slices.size(), "one step, and a draw for each slice");
  constexpr int32_t kTwo[2] = {};
  Queued next;
  std::vector<model::SequenceSlice> grown;
  for (size_t i = 0; i < draws.size(); ++i) {
    const model::SequenceSlice& slice = queued_[0].slices[i];
    TESSERA_CHECK(slice.draw != nullptr && slice.draw->mask.data() == draws[i]->mask.data(), "draws alike");
    TESSERA_CHECK(slice.logits == model::LogitRows::kNone && slice.ids.size() == 1, "a decode step");
    TESSERA_CHECK(slice.state->position() + 2 <= slice.state->capacity(), "room for the next token");
    next.slices.push_back({slice.state, {}, model::LogitRows::kNone, draws[i]});
    grown.push_back({slice.state, kTwo});
  }
  if (draws.size() > 1 && fails(faults_.step, failed_.step)) {
    for (const model::SequenceSlice& slice : grown) dynamic_cast<State&>(*slice.state).context ^= 0xBAD;
    queued_.clear();
    fail(ErrorCode::kNotFinite, "a fault that passes");
  }
  try {
    give_pages(grown);
  } catch (const Error&) {
    return false;
  }
  queued_.push_back(std::move(next));
  ++num_ahead_;
  return true;
}

TensorView HashRunner::finish_step() {
  TESSERA_CHECK(!queued_.empty() && !has_lost_queued_, "what is queued is still there");
  Queued step = std::move(queued_[0]);
  queued_.erase(queued_.begin());
  for (size_t i = 0; i < step.slices.size(); ++i) step.slices[i].ids = step.ids[i];
  try {
    const TensorView logits = compute(step.slices);
    if (queued_.empty()) return logits;
    for (const model::SequenceSlice& slice : step.slices) queued_[0].ids.push_back({std::max(slice.draw->token, 0)});
    for (size_t i = 0; i < queued_[0].ids.size(); ++i) queued_[0].slices[i].ids = queued_[0].ids[i];
    return logits;
  } catch (const std::exception&) {
    queued_.clear();
    throw;
  }
}

TensorView HashRunner::compute(std::span<const model::SequenceSlice> slices) {
  int64_t num_tokens = 0;
  bool is_bad = slices.size() > 1 && fails(faults_.step, failed_.step);
  const bool is_transient = is_bad;
  std::set<const model::SequenceState*> seen;
  logits_.clear();
  for (const model::SequenceSlice& slice : slices) {
    State& state = dynamic_cast<State&>(*slice.state);
    TESSERA_CHECK(states_.count(&state) == 1 && seen.insert(&state).second && !slice.ids.empty(), "slices");
    num_tokens += static_cast<int64_t>(slice.ids.size());
    for (size_t i = 0; i < slice.ids.size(); ++i) {
      TESSERA_CHECK(slice.ids[i] >= 0 && slice.ids[i] < kHashVocab, "id");
      see(state, slice.ids[i]);
      if (faults_.has_poison && is_poisoned(state.context)) is_bad = true;
      const bool is_last = i + 1 == slice.ids.size();
      if (slice.logits == model::LogitRows::kNone || (slice.logits == model::LogitRows::kLast && !is_last)) continue;
      logits_.push_back(static_cast<float>(state.context & 0xFFFFFF));
      logits_.push_back(static_cast<float>(state.context >> 24 & 0xFFFFFF));
      logits_.resize(logits_.size() + kHashVocab - 2, 1.0f);
    }
    TESSERA_CHECK(state.at <= state.capacity(), "capacity");
  }
  TESSERA_CHECK(num_tokens <= max_step_tokens_, "tokens of a step");
  if (is_bad) {
    if (!is_transient) ++failed_.poison;
    for (const model::SequenceSlice& slice : slices) dynamic_cast<State&>(*slice.state).context ^= 0xBAD;
    fail(ErrorCode::kNotFinite, is_transient ? "a fault that passes" : "a fault that stays");
  }
  for (const model::SequenceSlice& slice : slices) {
    if (slice.draw == nullptr) continue;
    const bool is_lost = fails(faults_.sample, failed_.sample);
    const State& state = dynamic_cast<const State&>(*slice.state);
    slice.draw->token =
        is_lost
            ? -1
            : masked_token(next_token(state.context, slice.draw->params.seed, slice.draw->position, hash_counts({})),
                           slice.draw->mask);
  }
  return {logits_.data(), DType::kF32, {static_cast<int64_t>(logits_.size()) / kHashVocab, kHashVocab}};
}

int32_t HashRunner::sample(const model::SampleRequest& request) {
  if (fails(faults_.sample, failed_.sample)) fail(ErrorCode::kNotFinite, "no logit is a number");
  TESSERA_CHECK(request.logits.size() == kHashVocab, "one row");
  const uint64_t context = static_cast<uint64_t>(request.logits[0]) | static_cast<uint64_t>(request.logits[1]) << 24;
  return masked_token(next_token(context, request.params.seed, request.position, hash_counts(request.counts)),
                      request.mask);
}

}  // namespace tessera::engine
