// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/emulated/block.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "device/cuda/emulated/capability.h"
#include "device/cuda/emulated/fibre.h"

#ifndef __SANITIZE_ADDRESS__
// The section of kernels' shared variables (cuda_runtime.h); the linker names its ends, where there is such a section.
extern "C" {
[[gnu::weak]] extern char __start_tessera_shared[];
[[gnu::weak]] extern char __stop_tessera_shared[];
}
#endif

namespace tessera::device::emulated {

constinit Current current;

namespace {

constexpr size_t kSharedAlignment = 1024;  // what 128-byte swizzles ask for
constexpr unsigned char kPoison = 0xFF;    // NaN in every float format, a negative index

using LateGroup = std::vector<std::unique_ptr<const LateWork>>;

void make_all(const LateGroup& group) {
  for (const auto& work : group) work->make();
}

struct LateGroups {
  LateGroup open;                // the group that has not ended
  std::deque<LateGroup> closed;  // under way, oldest first
};

class Copy final : public LateWork {
 public:
  Copy(void* target, const void* source, size_t bytes) : target_(target), source_(source), bytes_(bytes) {}
  void make() const override { std::memcpy(target_, source_, bytes_); }

 private:
  void* target_;
  const void* source_;
  size_t bytes_;
};

// The way that a thread has come (block.h), and how many of its asides there are.
struct Walk {
  uint64_t way = 0;
  int asides = 0;
};
// Of the emulated thread that this host thread runs now: a second one may run code of the same sources on the host.
constinit thread_local Walk* t_walk = nullptr;

struct Thread {
  Fibre fibre;
  uint3 index;
  int rank = 0;                     // of its block in the cluster
  const char* waits_for = nullptr;  // null: it can run
  Site site;
  bool (*is_ready)(const void* context) = nullptr;  // null: others say when it can run again
  const void* context = nullptr;
  std::string (*lack)(const void* context) = nullptr;
  Walk walk;                                                // since its warp met last
  LateGroups late[4];                                       // by LateKind
  std::deque<std::unique_ptr<const LateWork>> tensor_work;  // oldest first

  bool can_run() const { return waits_for == nullptr || (is_ready != nullptr && is_ready(context)); }
};

// Lanes of a warp that are to meet.
struct Meeting {
  unsigned mask = 0, arrived = 0;
  Site site;
  void* payloads[kWarp] = {};
};

// A block of the cluster that runs.
struct Block {
  uint3 index;
  unsigned char* shared = nullptr;
  std::vector<std::vector<Meeting>> meetings;  // by warp
  std::unique_ptr<BlockState> state;
  int num_alive = 0, num_at_barrier = 0;
  Site barrier_site;
};

// Something that is under way: of which block, and what.
struct Late {
  int rank;
  std::unique_ptr<const LateWork> work;
  const char* what;
};

// What ends a thread, or late work, that breaks a rule.
struct Broken {};

bool is_same_place(const Site& a, const Site& b) {
  if (a.line() != b.line()) return false;
  return a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0;
}

// The grid that runs. There is one at a time (stream.cc sees to that).
class Grid {
 public:
  bool run(const ThreadCode& code, dim3 grid, dim3 block, size_t shared_bytes, int cluster) {
    code_ = &code;
    broken_rule_.clear();
    current.block_size = block, current.grid_size = grid;
    num_threads_ = static_cast<int>(block.x * block.y * block.z);
    blocks_.resize(static_cast<size_t>(cluster));
    while (static_cast<int>(threads_.size()) < num_threads_ * cluster) threads_.push_back(std::make_unique<Thread>());
    shared_bytes_ = shared_bytes;
    for (Block& one : blocks_) {
      // Of exactly that size, so that AddressSanitizer sees what lies beyond.
      void* shared = nullptr;
      if (shared_bytes > 0 && posix_memalign(&shared, kSharedAlignment, shared_bytes) != 0) throw std::bad_alloc();
      one.shared = static_cast<unsigned char*>(shared);
    }
    for (unsigned z = 0; z < grid.z; ++z) {
      for (unsigned y = 0; y < grid.y; ++y) {
        for (unsigned x = 0; x < grid.x && broken_rule_.empty(); x += static_cast<unsigned>(cluster)) {
          for (unsigned rank = 0; Block & one : blocks_) one.index = {x + rank++, y, z};
          run_cluster();
        }
      }
    }
    for (Block& one : blocks_) std::free(one.shared);
    blocks_.clear();
    return broken_rule_.empty();
  }

  [[noreturn]] void fail(std::string rule) {
    broken_rule_ = std::move(rule);
    throw Broken();
  }

  void sync_block(const Site& site) {
    Block& block = this_block();
    if (block.num_at_barrier > 0 && !is_same_place(site, block.barrier_site)) {
      fail("__syncthreads() at " + words(site) + " while others wait at " + words(block.barrier_site));
    }
    block.barrier_site = site;
    ++block.num_at_barrier;
    if (!open_barrier(block)) pause(kAtBarrier, site);
  }

  int num_cluster_barriers() const { return num_cluster_barriers_; }
  void sync_cluster(const Site& site) {
    ++num_at_cluster_barrier_;
    if (!open_cluster_barrier()) pause(kAtClusterBarrier, site);
  }

  void collective(const Site& site, unsigned mask, void* payload, void (*complete)(void* const (&payloads)[kWarp])) {
    const int lane = current.lane();
    std::vector<Meeting>& meetings = this_block().meetings[static_cast<size_t>(current.index() / kWarp)];
    if ((mask >> lane & 1) == 0) fail(words(site) + ": a lane is not in its own mask");
    auto meeting = std::ranges::find_if(meetings, [&](const Meeting& m) { return (m.mask & mask) != 0; });
    if (meeting == meetings.end()) meeting = meetings.insert(meetings.end(), {mask, 0, site, {}});
    if (meeting->mask != mask || !is_same_place(meeting->site, site)) {
      fail(words(site) + ": lanes of a warp wait at " + words(meeting->site));
    }
    meeting->arrived |= 1u << lane;
    meeting->payloads[lane] = payload;
    if (meeting->arrived != mask) return pause("lanes of its warp", site);
    const Meeting complete_one = *meeting;
    meetings.erase(meeting);
    complete(complete_one.payloads);
    for (int i = 0; i < kWarp; ++i) {
      if (complete_one.payloads[i] == nullptr) continue;
      Thread& thread = thread_at(current.rank, current.index() / kWarp * kWarp + i);
      thread.waits_for = nullptr;
      if (mask == ~0u) thread.walk.way = 0;
    }
  }

  void wait_until(const Site& site, bool (*is_ready)(const void*), const void* context, const char* what,
                  std::string (*lack)(const void*)) {
    while (!is_ready(context)) {
      running_->is_ready = is_ready, running_->context = context, running_->lack = lack;
      pause(what, site);
    }
  }

  void engine_work_late(std::unique_ptr<const LateWork> work, const char* what) {
    if (toss()) return work->make();
    engine_work_.push_back({current.rank, std::move(work), what});
  }

  void tensor_work_late(std::unique_ptr<const LateWork> work) {
    auto& queue = running_->tensor_work;
    if (queue.empty() && toss()) return work->make();
    queue.push_back(std::move(work));
    ++num_tensor_work_;
  }

  BlockState& block_state(std::unique_ptr<BlockState> (*make)()) {
    Block& block = this_block();
    if (block.state == nullptr) block.state = make();
    return *block.state;
  }

  void* dynamic_shared() { return this_block().shared; }
  void* dynamic_shared_of(int rank) {
    if (rank < 0 || rank >= cluster_size()) fail("reaches for a block that the cluster does not have");
    Block& block = blocks_[static_cast<size_t>(rank)];
    if (block.num_alive == 0) fail("reaches into shared memory of a block that has ended");
    if (rank != current.rank && num_cluster_barriers_ == 0) {
      fail("reaches into shared memory of a block that may not have begun: the cluster has not met");
    }
    return block.shared;
  }
  int cluster_size() const { return static_cast<int>(blocks_.size()); }
  size_t dynamic_shared_bytes() const { return shared_bytes_; }
  Thread& running() { return *running_; }
  void seed_chance(uint32_t seed) { random_.seed(seed * 0x9E3779B9u); }
  bool toss() { return (random_() >> 16 & 1) != 0; }
  int below(int count) { return static_cast<int>((random_() >> 8) % static_cast<unsigned>(count)); }

 private:
  static constexpr int kStepsOfAChoice = 16;  // on average, where the cluster does not meet
  static constexpr const char* kTensorWork = "work of the tensor cores";
  static constexpr const char *kAtBarrier = "a barrier", *kAtClusterBarrier = "the cluster's barrier";

  Block& this_block() { return blocks_[static_cast<size_t>(current.rank)]; }
  Thread& thread_at(int rank, int index) { return *threads_[static_cast<size_t>(rank * num_threads_ + index)]; }
  int num_cluster_threads() const { return cluster_size() * num_threads_; }
  int num_alive() const {
    int count = 0;
    for (const Block& block : blocks_) count += block.num_alive;
    return count;
  }

  void pause(const char* waits_for, const Site& site) {
    running_->waits_for = waits_for;
    running_->site = site;
    running_->fibre.pause();
  }

  // Lets the threads on that have met at the block's barrier, once no other is left.
  bool open_barrier(Block& block) {
    if (block.num_at_barrier < block.num_alive) return false;
    block.num_at_barrier = 0;
    const auto rank = static_cast<int>(&block - blocks_.data());
    for (int i = 0; i < num_threads_; ++i) {
      Thread& thread = thread_at(rank, i);
      thread.walk.way = 0;
      if (thread.waits_for == kAtBarrier && &thread != running_) thread.waits_for = nullptr;
    }
    return true;
  }
  bool open_cluster_barrier() {
    if (num_at_cluster_barrier_ < num_alive()) return false;
    num_at_cluster_barrier_ = 0, ++num_cluster_barriers_;
    leave_meeting();
    for (int i = 0; i < num_cluster_threads(); ++i) {
      Thread& thread = thread_at(0, i);
      thread.walk.way = 0;
      if (thread.waits_for == kAtClusterBarrier && &thread != running_) thread.waits_for = nullptr;
    }
    return true;
  }

  static void run_thread();

  // While no thread runs.
  static void make_late(const Late& late) {
    current.rank = late.rank;
    try {
      late.work->make();
    } catch (const Broken&) {
    }
  }

  // The oldest work that some thread has given the tensor cores.
  Late take_tensor_work() {
    int chosen = below(num_tensor_work_);
    for (int i = 0; i < num_cluster_threads(); ++i) {
      auto& queue = thread_at(0, i).tensor_work;
      if (chosen >= static_cast<int>(queue.size())) {
        chosen -= static_cast<int>(queue.size());
        continue;
      }
      std::unique_ptr<const LateWork> work = std::move(queue.front());
      queue.pop_front();
      --num_tensor_work_;
      return {i / num_threads_, std::move(work), kTensorWork};
    }
    return {};  // none is left
  }

  Late take_late_work() {
    const int engine = static_cast<int>(engine_work_.size());
    if (num_tensor_work_ + engine == 0) return {};
    if (below(num_tensor_work_ + engine) >= engine) return take_tensor_work();
    std::swap(engine_work_[static_cast<size_t>(below(engine))], engine_work_.back());
    Late late = std::move(engine_work_.back());
    engine_work_.pop_back();
    return late;
  }

  void begin_cluster() {
#ifndef __SANITIZE_ADDRESS__
    if (__start_tessera_shared != nullptr) {
      std::memset(__start_tessera_shared, kPoison, static_cast<size_t>(__stop_tessera_shared - __start_tessera_shared));
    }
#endif
    engine_work_.clear();
    num_tensor_work_ = num_at_cluster_barrier_ = num_cluster_barriers_ = 0;
    leave_meeting();
    for (Block& block : blocks_) {
      if (block.shared != nullptr) std::memset(block.shared, kPoison, shared_bytes_);
      block.state.reset();
      block.meetings.assign(static_cast<size_t>(num_threads_ + kWarp - 1) / kWarp, {});
      block.num_alive = num_threads_, block.num_at_barrier = 0;
    }
    for (int i = 0; i < num_cluster_threads(); ++i) {
      Thread& thread = thread_at(0, i);
      const auto at = static_cast<unsigned>(i % num_threads_);
      const dim3& size = current.block_size;
      thread.index = {at % size.x, at / size.x % size.y, at / size.x / size.y};
      thread.rank = i / num_threads_;
      thread.waits_for = nullptr, thread.is_ready = nullptr, thread.lack = nullptr;
      thread.walk = {};
      for (LateGroups& groups : thread.late) groups.open.clear(), groups.closed.clear();
      thread.tensor_work.clear();
      thread.fibre.start(run_thread);
    }
    // Threads in a random order, another for each cluster: results must not depend on it.
    order_.resize(static_cast<size_t>(num_cluster_threads()));
    std::iota(order_.begin(), order_.end(), 0);
    for (size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[random_() % i]);
  }

  void become(const Thread& thread) {
    current.thread = thread.index, current.rank = thread.rank;
    current.block = this_block().index;
  }

  void resume(Thread& thread) {
    thread.waits_for = nullptr, thread.is_ready = nullptr, thread.lack = nullptr;
    running_ = &thread, t_walk = &thread.walk;
    become(thread);
    thread.fibre.resume();
    t_walk = nullptr;
    if (!broken_rule_.empty() || !thread.fibre.has_ended()) return;
    Block& block = this_block();
    --block.num_alive;
    std::ranges::for_each(thread.late[static_cast<int>(LateKind::kCopies)].closed, make_all);
    if (block.num_alive > 0 && block.num_at_barrier > 0) open_barrier(block);
    if (num_alive() > 0 && num_at_cluster_barrier_ > 0) open_cluster_barrier();
  }

  // Some blocks of a cluster run as far as they can without the others, one alone or all but one too: who is far ahead
  // overwrites what the others still read, reads what they have not written, ends while they need it. Who they are is
  // chosen whenever the cluster has met. Half of the time it stays so until they wait for the others, however many
  // steps lie between; else, and from then on, others are chosen now and then.
  void choose_who_runs() {
    run_all();
    if (cluster_size() > 1) who_runs_ = 1 + static_cast<unsigned>(below(static_cast<int>(all_blocks() - 1)));
  }
  void leave_meeting() {
    choose_who_runs();
    is_choice_kept_ = toss();
  }
  void run_all() {
    who_runs_ = all_blocks();
  }
  unsigned all_blocks() const {
    return (1u << cluster_size()) - 1;
  }  // a bit for each rank

  // Nobody can run, and nothing is under way.
  void blame_who_waits() {
    for (int i = 0; i < num_cluster_threads() && broken_rule_.empty(); ++i) {
      Thread& thread = thread_at(0, i);
      if (thread.fibre.has_ended()) continue;
      become(thread);
      broken_rule_ = words(thread.site) + ": waits for ever for " + thread.waits_for;
      if (thread.lack != nullptr) broken_rule_ += ": " + thread.lack(thread.context);
    }
  }

  void run_cluster() {
    begin_cluster();
    while (num_alive() > 0) {
      bool has_run = false;
      if (cluster_size() > 1 && !is_choice_kept_ && below(kStepsOfAChoice) == 0) toss() ? choose_who_runs() : run_all();
      for (const int i : order_) {
        Thread& thread = thread_at(0, i);
        if (thread.fibre.has_ended() || (who_runs_ >> thread.rank & 1) == 0) continue;
        current.rank = thread.rank;  // what it waits for may look at its block
        if (!thread.can_run()) continue;
        has_run = true;
        resume(thread);
        if (!broken_rule_.empty()) return report();
      }
      if (num_alive() == 0) break;  // what is under way now nobody has waited for
      // Late enough where nobody can run; the tensor cores' work now and then before.
      Late late{};
      const bool did_all = who_runs_ == all_blocks();
      if (!has_run && !did_all) {
        if (toss()) late = take_late_work();
        if (late.work == nullptr) run_all(), is_choice_kept_ = false;
      } else if (!has_run) {
        late = take_late_work();
      } else if (num_tensor_work_ > 0 && below(8) == 0) {
        late = take_tensor_work();
      }
      if (late.work != nullptr) {
        make_late(late);
      } else if (!has_run && did_all) {
        blame_who_waits();
      }
      if (!broken_rule_.empty()) return report();
    }
    if (!engine_work_.empty() || num_tensor_work_ > 0) {
      const char* what = num_tensor_work_ > 0 ? kTensorWork : engine_work_.front().what;
      broken_rule_ = std::string("the block has ended while ") + what + " was under way";
    }
    for (const Block& block : blocks_) {
      if (broken_rule_.empty() && block.state != nullptr) broken_rule_ = block.state->fault_at_end();
    }
    if (!broken_rule_.empty()) report();
  }

  void report() const {
    const uint3 &b = current.block, &t = current.thread;
    std::fprintf(stderr, "emulated GPU: block (%u, %u, %u), thread (%u, %u, %u): %s\n", b.x, b.y, b.z, t.x, t.y, t.z,
                 broken_rule_.c_str());
  }

  const ThreadCode* code_ = nullptr;
  size_t shared_bytes_ = 0;
  std::string broken_rule_;
  std::vector<std::unique_ptr<Thread>> threads_;  // block by block
  std::vector<int> order_;
  std::vector<Block> blocks_;  // of the cluster
  std::vector<Late> engine_work_;
  Thread* running_ = nullptr;
  int num_threads_ = 0;  // of a block
  int num_at_cluster_barrier_ = 0, num_cluster_barriers_ = 0, num_tensor_work_ = 0;
  unsigned who_runs_ = 1;  // of the cluster's blocks, a bit for each rank
  bool is_choice_kept_ = false;
  std::minstd_rand random_{1};
};

Grid& the_grid() {
  static Grid& grid = *new Grid;  // outlives whoever waits for a stream at the program's end
  return grid;
}

void Grid::run_thread() {
  try {
    the_grid().code_->run();
  } catch (const Broken&) {  // the rule is known
  }
}

}  // namespace

std::string words(const Site& site) {
  const std::string path = site.file_name();
  const size_t source = path.rfind("src/");
  return (source == std::string::npos ? path : path.substr(source)) + ":" + std::to_string(site.line());
}

void seed_chance(uint32_t seed) {
  the_grid().seed_chance(seed);
}

bool run_grid(const ThreadCode& code, dim3 grid, dim3 block, size_t shared_bytes, int cluster) {
  return the_grid().run(code, grid, block, shared_bytes, cluster);
}

void fail(std::string rule) {
  the_grid().fail(std::move(rule));
}

void sync_block(const Site& site) {
  the_grid().sync_block(site);
}

void sync_cluster(const Site& site) {
  the_grid().sync_cluster(site);
}

int num_cluster_barriers() {
  return the_grid().num_cluster_barriers();
}

int cluster_size() {
  return the_grid().cluster_size();
}

void collective(const Site& site, unsigned mask, void* payload, void (*complete)(void* const (&payloads)[kWarp])) {
  the_grid().collective(site, mask, payload, complete);
}

uint64_t way_of_thread() {
  return the_grid().running().walk.way;
}

Aside::Aside() {
  ++the_grid().running().walk.asides;
}
Aside::~Aside() {
  --the_grid().running().walk.asides;
}

void* dynamic_shared() {
  return the_grid().dynamic_shared();
}

size_t dynamic_shared_bytes() {
  return the_grid().dynamic_shared_bytes();
}

void* dynamic_shared_of(int rank) {
  return the_grid().dynamic_shared_of(rank);
}

int random_below(int below) {
  return the_grid().below(below);
}

void work_late(LateKind kind, std::unique_ptr<const LateWork> work) {
  // In order within a kind: what follows something late is late.
  LateGroups& groups = the_grid().running().late[static_cast<int>(kind)];
  const bool must_follow = kind != LateKind::kCopies && !(groups.open.empty() && groups.closed.empty());
  if (!must_follow && the_grid().toss()) return work->make();
  groups.open.push_back(std::move(work));
}

void commit_late(LateKind kind) {
  LateGroups& groups = the_grid().running().late[static_cast<int>(kind)];
  groups.closed.push_back(std::move(groups.open));
  groups.open.clear();
}

void wait_for_late(LateKind kind, int newest) {
  LateGroups& groups = the_grid().running().late[static_cast<int>(kind)];
  while (static_cast<int>(groups.closed.size()) > newest) {
    make_all(groups.closed.front());
    groups.closed.pop_front();
  }
}

void copy_async(void* target, const void* source, size_t bytes) {
  const auto is_aligned = [&](const void* at) { return reinterpret_cast<uintptr_t>(at) % bytes == 0; };
  if (!is_aligned(target) || !is_aligned(source)) fail("an asynchronous copy is misaligned");
  work_late(LateKind::kCopies, std::make_unique<Copy>(target, source, bytes));
}

void engine_work_late(std::unique_ptr<const LateWork> work, const char* what) {
  the_grid().engine_work_late(std::move(work), what);
}

void tensor_work_late(std::unique_ptr<const LateWork> work) {
  the_grid().tensor_work_late(std::move(work));
}

void wait_until(const Site& site, bool (*is_ready)(const void* context), const void* context, const char* what,
                std::string (*lack)(const void* context)) {
  the_grid().wait_until(site, is_ready, context, what, lack);
}

BlockState& block_state(std::unique_ptr<BlockState> (*make)()) {
  return the_grid().block_state(make);
}

}  // namespace tessera::device::emulated

// Called from every piece of code without a branch, of sources that are compiled so, and by far the most often of all
// that is emulated.
extern "C" [[gnu::optimize("O2"), gnu::no_sanitize("address", "undefined")]] void __sanitizer_cov_trace_pc() {
  tessera::device::emulated::Walk* const walk = tessera::device::emulated::t_walk;
  if (walk == nullptr || walk->asides > 0) return;
  walk->way = (walk->way ^ reinterpret_cast<uintptr_t>(__builtin_return_address(0))) * 0x9E3779B97F4A7C15u;
}
