// SPDX-License-Identifier: Apache-2.0
#include "model/mirrored_runner.h"

#include <fmt/format.h>

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
  kStep,         // number of slices, of each: sequence, rows of logits, whether it draws, number of tokens, these
  kDraft,        // the same
  kTrace,        // whether steps are traced from now on: what ranks run, and what they send each other, depends on it
  kFault,        // code: the step or draft just made threw it on rank 0
  kEnd,
};

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
  void send(const Writer& order) { bootstrap_.send_order(order.bytes()); }
  // For destructors: a group that has ended needs no more orders, and says so at the next call.
  void send_last(const Writer& order) noexcept {
    try {
      send(order);
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

TensorView MirroredRunner::run(std::span<const SequenceSlice> slices, bool is_draft) {
  check_draws(slices, facts().vocab_size);  // the others have no masks, and would go on
  Writer order(is_draft ? Order::kDraft : Order::kStep);
  order.put(static_cast<uint32_t>(slices.size()));
  own_.assign(slices.begin(), slices.end());
  for (SequenceSlice& slice : own_) {
    const auto& state = dynamic_cast<const Orders::State&>(*slice.state);
    order.put(state.id()).put(slice.logits).put(slice.draw != nullptr).put(static_cast<uint32_t>(slice.ids.size()));
    for (const int32_t id : slice.ids) order.put(id);
    slice.state = &state.inner();
  }
  orders_->send(order);
  try {
    return is_draft ? runner_.draft(own_) : runner_.step(own_);
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
  return run(slices, false);
}

TensorView MirroredRunner::draft(std::span<const SequenceSlice> slices) {
  return run(slices, true);
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
      if (kind == Order::kStep || kind == Order::kDraft) {
        compute(order, kind == Order::kDraft);
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

  void compute(Reader& order, bool is_draft) {
    const auto count = order.take<uint32_t>();
    slices_.assign(count, {}), draws_.assign(count, {}), ids_.assign(count, {});
    for (size_t i = 0; i < count; ++i) {
      slices_[i].state = &state(order.take<uint64_t>());
      slices_[i].logits = order.take<LogitRows>();
      // Rank 0's token counts; a draw here makes the same work of the step.
      if (order.take<bool>()) slices_[i].draw = &draws_[i];
      ids_[i].resize(order.take<uint32_t>());
      for (int32_t& id : ids_[i]) id = order.take<int32_t>();
      slices_[i].ids = ids_[i];
    }
    try {
      is_draft ? runner_.draft(slices_) : runner_.step(slices_);
    } catch (const Error& error) {
      fault_ = error.code(), why_ = error.what();
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
  std::vector<Draw> draws_;
  std::vector<std::vector<int32_t>> ids_;
  std::optional<ErrorCode> fault_;  // of the last step, until rank 0 says that it had it too
  std::optional<std::string> why_;
};

}  // namespace

void follow(Runner& runner, comm::Bootstrap& bootstrap) {
  Follower(runner, bootstrap).run();
}

}  // namespace tessera::model
