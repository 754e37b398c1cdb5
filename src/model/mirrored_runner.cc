// SPDX-License-Identifier: Apache-2.0
#include "model/mirrored_runner.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <type_traits>
#include <unordered_map>

#include "base/error.h"
#include "model/draw_check.h"

namespace tessera::model {

namespace {

enum class Order : uint8_t {
  kNewSequence,  // id, capacity
  kFork,         // id of the copy, of the sequence
  kSnapshot,     // id, of the sequence
  kMark,         // id, of the sequence
  kRollback,     // of the sequence, of the mark
  kResume,       // id, of the snapshot, capacity
  kRelease,      // id of whatever it is
  kStep,   // what pages were taken (page_history()), number of slices, of each: sequence, rows of logits, whether it
           // draws and how, number of tokens, these
  kDraft,  // the same
  kQueueStep,  // the same, then number of masks and these
  kQueueNext,  // number of draws, these
  kFinishStep,
  kTrace,  // whether steps are traced from now on: what ranks run, and what they send each other, depends on it
  kFault,  // code: the step or draft just made, or its half, threw it on rank 0
  kEnd,
};

constexpr uint32_t kNoMask = UINT32_MAX;
// Masks of a step that others are told, so that the next one can go on from what it draws: some that all requests
// share. Each is a bit for every token of the vocabulary, and who answers by a grammar has one of its own.
constexpr size_t kMostMasks = 2;

// How long a rank whose step failed waits for rank 0 to say that it failed there too: that is said at once.
constexpr double kFaultSeconds = 5;

class Writer {
 public:
  explicit Writer(Order order) { put(order); }
  template <class T>
  Writer& put(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const size_t at = bytes_.size();
    bytes_.resize(at + sizeof(value));
    std::memcpy(bytes_.data() + at, &value, sizeof(value));
    return *this;
  }
  // `mask`: which of those that the order has; kNoMask where it has none, or not this one: then others draw another
  // token.
  Writer& put_draw(const Draw& draw, uint32_t mask) { return put(draw.params).put(draw.position).put(mask); }
  std::span<const uint8_t> bytes() const { return bytes_; }

 private:
  std::vector<uint8_t> bytes_;
};

class Reader {
 public:
  explicit Reader(std::vector<uint8_t> bytes) : bytes_(std::move(bytes)) {}
  template <class T>
  T take() {
    T value{};
    TESSERA_CHECK(bytes_.size() - at_ >= sizeof(value), "an order that is whole");
    std::memcpy(&value, bytes_.data() + at_, sizeof(value));
    at_ += sizeof(value);
    return value;
  }
  Draw take_draw(uint32_t& mask) {
    const auto params = take<SamplingParams>();
    const auto position = take<uint64_t>();
    mask = take<uint32_t>();
    return {.params = params, .position = position};
  }

 private:
  std::vector<uint8_t> bytes_;
  size_t at_ = 0;
};

}  // namespace

// Rank 0's side of the channel, and the numbers by which the others know states.
class MirroredRunner::Orders {
 public:
  explicit Orders(comm::Bootstrap& bootstrap) : bootstrap_(bootstrap) {}
  uint64_t next_id() { return next_id_++; }
  void send(const Writer& order) {
    try {
      bootstrap_.send_order(order.bytes());
    } catch (const Error& error) {
      // Whoever ends the program says so to clients; by itself the error would reach them as their request's own.
      if (error.code() == ErrorCode::kDeviceError) end_group(error.what());
      throw;
    }
  }
  // For destructors: a group that has ended needs no more orders, and says so at the next call.
  void send_last(const Writer& order) noexcept {
    try {
      bootstrap_.send_order(order.bytes());
    } catch (const std::exception&) {
    }
  }
  void end_group(const std::string& why) noexcept { bootstrap_.end_group(why); }

  // A thing of rank 0 that the others have too, until it is destroyed.
  class Name {
   public:
    explicit Name(Orders& orders) : orders_(orders), id_(orders.next_id()) {}
    ~Name() { orders_.send_last(Writer(Order::kRelease).put(id_)); }
    Name(const Name&) = delete;
    Name& operator=(const Name&) = delete;
    uint64_t id() const { return id_; }
    Orders& orders() const { return orders_; }

   private:
    Orders& orders_;
    uint64_t id_;
  };

  class Mark final : public StateMark {
   public:
    Mark(Orders& orders, std::unique_ptr<StateMark> mark) : mark_(std::move(mark)), name_(orders) {}
    int64_t position() const override { return mark_->position(); }
    const StateMark& inner() const { return *mark_; }
    uint64_t id() const { return name_.id(); }

   private:
    std::unique_ptr<StateMark> mark_;
    Name name_;
  };

  class Snapshot final : public StateSnapshot {
   public:
    Snapshot(Orders& orders, std::unique_ptr<StateSnapshot> snapshot) : snapshot_(std::move(snapshot)), name_(orders) {}
    int64_t position() const override { return snapshot_->position(); }
    int64_t own_bytes() const override { return snapshot_->own_bytes(); }
    std::span<const int32_t> pages() const override { return snapshot_->pages(); }
    std::vector<uint8_t> save() const override { return snapshot_->save(); }
    void save_page(size_t n, std::span<uint8_t> out) const override { snapshot_->save_page(n, out); }
    const StateSnapshot& inner() const { return *snapshot_; }
    uint64_t id() const { return name_.id(); }

   private:
    std::unique_ptr<StateSnapshot> snapshot_;
    Name name_;
  };

  class State final : public SequenceState {
   public:
    State(Orders& orders, std::unique_ptr<SequenceState> state) : state_(std::move(state)), name_(orders) {}
    int64_t position() const override { return state_->position(); }
    int64_t capacity() const override { return state_->capacity(); }
    std::unique_ptr<SequenceState> fork() const override {
      auto copy = std::make_unique<State>(name_.orders(), state_->fork());
      name_.orders().send(Writer(Order::kFork).put(copy->id()).put(id()));
      return copy;
    }
    std::unique_ptr<StateSnapshot> snapshot() const override {
      auto snapshot = std::make_unique<Snapshot>(name_.orders(), state_->snapshot());
      name_.orders().send(Writer(Order::kSnapshot).put(snapshot->id()).put(id()));
      return snapshot;
    }
    std::unique_ptr<StateMark> mark() const override {
      auto mark = std::make_unique<Mark>(name_.orders(), state_->mark());
      name_.orders().send(Writer(Order::kMark).put(mark->id()).put(id()));
      return mark;
    }
    void rollback(const StateMark& mark) override {
      const auto& own = dynamic_cast<const Mark&>(mark);
      state_->rollback(own.inner());
      name_.orders().send(Writer(Order::kRollback).put(id()).put(own.id()));
    }
    std::vector<uint8_t> save() const override { return state_->save(); }
    SequenceState& inner() const { return *state_; }
    uint64_t id() const { return name_.id(); }

   private:
    std::unique_ptr<SequenceState> state_;
    Name name_;
  };

 private:
  comm::Bootstrap& bootstrap_;
  uint64_t next_id_ = 1;
};

MirroredRunner::MirroredRunner(Runner& runner, comm::Bootstrap& bootstrap)
    : runner_(runner), orders_(std::make_unique<Orders>(bootstrap)) {}

MirroredRunner::~MirroredRunner() {
  orders_->send_last(Writer(Order::kEnd));
}

std::unique_ptr<SequenceState> MirroredRunner::new_sequence(int64_t capacity) {
  auto state = std::make_unique<Orders::State>(*orders_, runner_.new_sequence(capacity));
  orders_->send(Writer(Order::kNewSequence).put(state->id()).put(capacity));
  return state;
}

std::unique_ptr<SequenceState> MirroredRunner::resume(const StateSnapshot& snapshot, int64_t capacity) {
  const auto& own = dynamic_cast<const Orders::Snapshot&>(snapshot);
  auto state = std::make_unique<Orders::State>(*orders_, runner_.resume(own.inner(), capacity));
  orders_->send(Writer(Order::kResume).put(state->id()).put(own.id()).put(capacity));
  return state;
}

std::unique_ptr<SequenceState> MirroredRunner::restore(std::span<const uint8_t>) {
  fail(ErrorCode::kUnsupported, "several ranks can't go on from a saved state: each has its own share of the weights");
}

std::unique_ptr<StateSnapshot> MirroredRunner::restore_snapshot(std::span<const uint8_t>,
                                                                std::span<const std::span<const uint8_t>>) {
  fail(ErrorCode::kUnsupported, "several ranks can't go on from a saved state: each has its own share of the weights");
}

void MirroredRunner::set_tracer(Tracer* tracer) {
  runner_.set_tracer(tracer);
  orders_->send(Writer(Order::kTrace).put(tracer != nullptr));
}

void MirroredRunner::send_slices(uint8_t kind, std::span<const SequenceSlice> slices) {
  check_draws(slices, facts().vocab_size);  // the others have not all masks, and would go on
  std::vector<std::span<const uint32_t>> masks;
  const auto row_of = [&](std::span<const uint32_t> mask) -> uint32_t {
    const auto at = std::find_if(masks.begin(), masks.end(), [&](auto one) { return one.data() == mask.data(); });
    return at == masks.end() ? kNoMask : static_cast<uint32_t>(at - masks.begin());
  };
  for (const SequenceSlice& slice : slices) {
    if (slice.draw == nullptr || slice.draw->mask.empty() || row_of(slice.draw->mask) != kNoMask) continue;
    masks.push_back(slice.draw->mask);
  }
  tells_masks_ = static_cast<Order>(kind) == Order::kQueueStep && masks.size() <= kMostMasks;
  if (!tells_masks_) masks.clear();
  Writer order(static_cast<Order>(kind));
  order.put(runner_.page_history()).put(static_cast<uint32_t>(slices.size()));
  own_.assign(slices.begin(), slices.end());
  for (SequenceSlice& slice : own_) {
    const auto& state = dynamic_cast<const Orders::State&>(*slice.state);
    order.put(state.id()).put(slice.logits).put(slice.draw != nullptr);
    if (slice.draw != nullptr) order.put_draw(*slice.draw, row_of(slice.draw->mask));
    order.put(static_cast<uint32_t>(slice.ids.size()));
    for (const int32_t id : slice.ids) order.put(id);
    slice.state = &state.inner();
  }
  order.put(static_cast<uint32_t>(masks.size()));
  for (const std::span<const uint32_t> mask : masks) {
    order.put(static_cast<uint32_t>(mask.size()));
    for (const uint32_t word : mask) order.put(word);
  }
  orders_->send(order);
}

template <class Part>
auto MirroredRunner::run_alike(const Part& part) {
  try {
    return part();
  } catch (const Error& error) {
    // What follows from request and weights comes to every rank alike, and is taken back there. Memory may end here
    // alone: the others then wait in a sum of this step.
    switch (error.code()) {
      case ErrorCode::kInvalidArgument:
      case ErrorCode::kUnsupported:
      case ErrorCode::kNotFinite:
        orders_->send(Writer(Order::kFault).put(error.code()));
        break;
      default:
        orders_->end_group(error.what());
    }
    throw;
  } catch (const std::exception& error) {
    orders_->end_group(error.what());
    throw;
  }
}

TensorView MirroredRunner::step(std::span<const SequenceSlice> slices) {
  send_slices(static_cast<uint8_t>(Order::kStep), slices);
  return run_alike([this] { return runner_.step(own_); });
}

TensorView MirroredRunner::draft(std::span<const SequenceSlice> slices) {
  send_slices(static_cast<uint8_t>(Order::kDraft), slices);
  return run_alike([this] { return runner_.draft(own_); });
}

void MirroredRunner::queue_step(std::span<const SequenceSlice> slices) {
  send_slices(static_cast<uint8_t>(Order::kQueueStep), slices);
  run_alike([this] { runner_.queue_step(own_); });
}

// Here first: whether there is a next step only rank 0 knows, and the others make it where it does.
bool MirroredRunner::queue_next(std::span<Draw* const> draws) {
  return run_alike([&] {
    if (!tells_masks_ || !runner_.queue_next(draws)) return false;
    Writer order(Order::kQueueNext);
    order.put(static_cast<uint32_t>(draws.size()));
    for (const Draw* draw : draws) order.put_draw(*draw, kNoMask);  // theirs are those of the step before
    orders_->send(order);
    return true;
  });
}

TensorView MirroredRunner::finish_step() {
  return run_alike([this] {
    orders_->send(Writer(Order::kFinishStep));
    return runner_.finish_step();
  });
}

namespace {

class Follower {
 public:
  Follower(Runner& runner, comm::Bootstrap& bootstrap) : runner_(runner), bootstrap_(bootstrap) {}
  ~Follower() { runner_.set_tracer(nullptr); }
  Follower(const Follower&) = delete;
  Follower& operator=(const Follower&) = delete;

  void run() {
    for (;;) {
      Reader order(next());
      const auto kind = order.take<Order>();
      if (kind == Order::kFault) {
        check_fault(order.take<ErrorCode>());
        continue;
      }
      if (fault_) fail(*fault_, *why_);  // rank 0 went on
      if (kind == Order::kEnd) return;
      if (computes(kind)) {
        compute(kind, order);
      } else if (kind == Order::kTrace) {
        runner_.set_tracer(order.take<bool>() ? &nobody_ : nullptr);
      } else {
        apply(kind, order);
      }
    }
  }

 private:
  // Where this rank's step failed, only "here too" can follow.
  std::vector<uint8_t> next() {
    if (!fault_) return bootstrap_.take_order();
    try {
      return bootstrap_.take_order(kFaultSeconds);
    } catch (const Error&) {
      bootstrap_.check();
      fail(*fault_, *why_);
    }
  }

  void check_fault(ErrorCode code) {
    if (!fault_ || *fault_ != code) {
      fail(ErrorCode::kInternal, fmt::format("a step failed on rank 0 ({}) and here {}", to_string(code),
                                             fault_ ? "otherwise: " + *why_ : "went well"));
    }
    fault_.reset();
  }

  static bool computes(Order kind) {
    return kind == Order::kStep || kind == Order::kDraft || kind == Order::kQueueStep || kind == Order::kQueueNext ||
           kind == Order::kFinishStep;
  }

  void compute(Order kind, Reader& order) {
    if (kind == Order::kQueueNext) {
      read_next(order);
    } else if (kind != Order::kFinishStep) {
      read_slices(order);
    }
    try {
      switch (kind) {
        case Order::kStep:
          runner_.step(slices_);
          break;
        case Order::kDraft:
          runner_.draft(slices_);
          break;
        case Order::kQueueStep:
          runner_.queue_step(slices_);
          break;
        case Order::kQueueNext:
          if (!runner_.queue_next(next_)) fail(ErrorCode::kInternal, "no room here for a step that rank 0 has queued");
          break;
        default:  // kFinishStep
          runner_.finish_step();
      }
    } catch (const Error& error) {
      fault_ = error.code(), why_ = error.what();
    }
  }

  // Rank 0's tokens count; a draw here makes the same work of the step, and the next one goes on from it.
  void read_slices(Reader& order) {
    // Pages that ranks share have one place: others' would be overwritten.
    if (const auto history = order.take<uint64_t>(); history != runner_.page_history()) {
      fail(ErrorCode::kInternal, fmt::format("pages were taken otherwise on rank 0 ({:016x}) than here ({:016x})",
                                             history, runner_.page_history()));
    }
    const auto count = order.take<uint32_t>();
    slices_.assign(count, {}), draws_.assign(count, {}), ids_.assign(count, {});
    rows_of_masks_.assign(count, kNoMask);
    for (size_t i = 0; i < count; ++i) {
      slices_[i].state = &state(order.take<uint64_t>());
      slices_[i].logits = order.take<LogitRows>();
      if (order.take<bool>()) {
        draws_[i] = order.take_draw(rows_of_masks_[i]);
        slices_[i].draw = &draws_[i];
      }
      ids_[i].resize(order.take<uint32_t>());
      for (int32_t& id : ids_[i]) id = order.take<int32_t>();
      slices_[i].ids = ids_[i];
    }
    masks_.assign(order.take<uint32_t>(), {});
    for (std::vector<uint32_t>& mask : masks_) {
      mask.resize(order.take<uint32_t>());
      for (uint32_t& word : mask) word = order.take<uint32_t>();
    }
    for (size_t i = 0; i < count; ++i) {
      if (rows_of_masks_[i] != kNoMask) draws_[i].mask = masks_.at(rows_of_masks_[i]);
    }
  }

  // Two steps are queued at most: those before the last are done with their draws.
  void read_next(Reader& order) {
    std::swap(draws_, earlier_draws_);
    draws_.assign(order.take<uint32_t>(), {});
    TESSERA_CHECK(draws_.size() == slices_.size(), "a draw for each slice of the step before");
    next_.clear();
    for (size_t i = 0; i < draws_.size(); ++i) {
      uint32_t none = kNoMask;
      draws_[i] = order.take_draw(none);
      draws_[i].mask = earlier_draws_[i].mask;
      next_.push_back(&draws_[i]);
    }
  }

  void apply(Order kind, Reader& order) {
    const auto id = order.take<uint64_t>();
    switch (kind) {
      case Order::kNewSequence:
        states_[id] = runner_.new_sequence(order.take<int64_t>());
        break;
      case Order::kFork:
        states_[id] = state(order.take<uint64_t>()).fork();
        break;
      case Order::kSnapshot:
        snapshots_[id] = state(order.take<uint64_t>()).snapshot();
        break;
      case Order::kMark:
        marks_[id] = state(order.take<uint64_t>()).mark();
        break;
      case Order::kRollback:
        state(id).rollback(known(marks_, "mark", order.take<uint64_t>()));
        break;
      case Order::kResume: {
        const StateSnapshot& snapshot = known(snapshots_, "snapshot", order.take<uint64_t>());
        states_[id] = runner_.resume(snapshot, order.take<int64_t>());
        break;
      }
      default:  // kRelease
        states_.erase(id), snapshots_.erase(id), marks_.erase(id);
    }
  }

  SequenceState& state(uint64_t id) { return known(states_, "sequence", id); }

  template <class Things>
  static typename Things::mapped_type::element_type& known(const Things& things, const char* what, uint64_t id) {
    const auto found = things.find(id);
    if (found == things.end()) {
      fail(ErrorCode::kInternal, fmt::format("an order speaks of {} {}, which is not here", what, id));
    }
    return *found->second;
  }

  // What rank 0 looks at is computed op by op here too, and looked at by nobody.
  class Nobody final : public Tracer {
    void tensor(std::string_view, const TensorView&) override {}
    bool looks() const override { return false; }
  };

  Runner& runner_;
  comm::Bootstrap& bootstrap_;
  Nobody nobody_;
  std::unordered_map<uint64_t, std::unique_ptr<SequenceState>> states_;
  std::unordered_map<uint64_t, std::unique_ptr<StateSnapshot>> snapshots_;
  std::unordered_map<uint64_t, std::unique_ptr<StateMark>> marks_;
  std::vector<SequenceSlice> slices_;
  std::vector<Draw> draws_, earlier_draws_;
  std::vector<Draw*> next_;
  std::vector<uint32_t> rows_of_masks_;
  std::vector<std::vector<uint32_t>> masks_;
  std::vector<std::vector<int32_t>> ids_;
  std::optional<ErrorCode> fault_;  // of the last step, until rank 0 says that it had it too
  std::optional<std::string> why_;
};

}  // namespace

void follow(Runner& runner, comm::Bootstrap& bootstrap) {
  Follower(runner, bootstrap).run();
}

}  // namespace tessera::model
