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

struct Thread {
  Fibre fibre;
  uint3 index;
  const char* waits_for = nullptr;  // null: it can run
  Site site;
  bool (*is_ready)(const void* context) = nullptr;  // null: others say when it can run again
  const void* context = nullptr;
  std::string (*lack)(const void* context) = nullptr;
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

// What ends a thread, or late work, that breaks a rule.
struct Broken {};

bool is_same_place(const Site& a, const Site& b) {
  return a.line() == b.line() && std::strcmp(a.file_name(), b.file_name()) == 0;
}

// The grid that runs. There is one at a time (stream.cc sees to that).
class Grid {
 public:
  bool run(const ThreadCode& code, dim3 grid, dim3 block, size_t shared_bytes) {
    code_ = &code;
    broken_rule_.clear();
    current.block_size = block, current.grid_size = grid;
    num_threads_ = static_cast<int>(block.x * block.y * block.z);
    while (static_cast<int>(threads_.size()) < num_threads_) threads_.push_back(std::make_unique<Thread>());
    // Of exactly that size, so that AddressSanitizer sees what lies beyond.
    void* shared = nullptr;
    if (shared_bytes > 0 && posix_memalign(&shared, kSharedAlignment, shared_bytes) != 0) throw std::bad_alloc();
    shared_ = static_cast<unsigned char*>(shared), shared_bytes_ = shared_bytes;
    for (unsigned z = 0; z < grid.z; ++z) {
      for (unsigned y = 0; y < grid.y; ++y) {
        for (unsigned x = 0; x < grid.x && broken_rule_.empty(); ++x) {
          current.block = {x, y, z};
          if (shared_ != nullptr) std::memset(shared_, kPoison, shared_bytes);
          run_block();
        }
      }
    }
    std::free(shared_);
    return broken_rule_.empty();
  }

  [[noreturn]] void fail(std::string rule) {
    broken_rule_ = std::move(rule);
    throw Broken();
  }

  void sync_block(const Site& site) {
    if (num_at_barrier_ > 0 && !is_same_place(site, barrier_site_)) {
      fail("__syncthreads() at " + words(site) + " while others wait at " + words(barrier_site_));
    }
    barrier_site_ = site;
    ++num_at_barrier_;
    if (!open_barrier()) pause("a barrier", site);
  }

  void collective(const Site& site, unsigned mask, void* payload, void (*complete)(void* const (&payloads)[kWarp])) {
    const int lane = current.lane();
    std::vector<Meeting>& meetings = meetings_[static_cast<size_t>(current.index() / kWarp)];
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
      if (complete_one.payloads[i] != nullptr) thread_at(current.index() / kWarp * kWarp + i).waits_for = nullptr;
    }
  }

  void wait_until(const Site& site, bool (*is_ready)(const void*), const void* context, const char* what,
                  std::string (*lack)(const void*)) {
    while (!is_ready(context)) {
      running_->is_ready = is_ready, running_->context = context, running_->lack = lack;
      pause(what, site);
    }
  }

  void engine_work_late(std::unique_ptr<const LateWork> work) {
    if (toss()) return work->make();
    engine_work_.push_back(std::move(work));
  }

  void tensor_work_late(std::unique_ptr<const LateWork> work) {
    auto& queue = running_->tensor_work;
    if (queue.empty() && toss()) return work->make();
    queue.push_back(std::move(work));
    ++num_tensor_work_;
  }

  BlockState& block_state(std::unique_ptr<BlockState> (*make)()) {
    if (block_state_ == nullptr) block_state_ = make();
    return *block_state_;
  }

  void* dynamic_shared() const { return shared_; }
  size_t dynamic_shared_bytes() const { return shared_bytes_; }
  Thread& running() { return *running_; }
  bool toss() { return (random_() >> 16 & 1) != 0; }
  int below(int count) { return static_cast<int>((random_() >> 8) % static_cast<unsigned>(count)); }

 private:
  Thread& thread_at(int index) { return *threads_[static_cast<size_t>(index)]; }

  void pause(const char* waits_for, const Site& site) {
    running_->waits_for = waits_for;
    running_->site = site;
    running_->fibre.pause();
  }

  // Lets the threads on that have met at the barrier, once no other is left.
  bool open_barrier() {
    if (num_at_barrier_ < num_alive_) return false;
    num_at_barrier_ = 0;
    for (int i = 0; i < num_threads_; ++i) {
      Thread& thread = thread_at(i);
      if (!thread.fibre.has_ended() && &thread != running_) thread.waits_for = nullptr;
    }
    return true;
  }

  static void run_thread();

  // While no thread runs.
  static void make_late(const LateWork& work) {
    try {
      work.make();
    } catch (const Broken&) {
    }
  }

  // The oldest work that some thread has given the tensor cores.
  std::unique_ptr<const LateWork> take_tensor_work() {
    int chosen = below(num_tensor_work_);
    for (int i = 0; i < num_threads_; ++i) {
      auto& queue = thread_at(i).tensor_work;
      if (chosen >= static_cast<int>(queue.size())) {
        chosen -= static_cast<int>(queue.size());
        continue;
      }
      std::unique_ptr<const LateWork> work = std::move(queue.front());
      queue.pop_front();
      --num_tensor_work_;
      return work;
    }
    return nullptr;  // none is left
  }

  // Something that is under way; null: nothing is.
  std::unique_ptr<const LateWork> take_late_work() {
    const int engine = static_cast<int>(engine_work_.size());
    if (num_tensor_work_ + engine == 0) return nullptr;
    if (below(num_tensor_work_ + engine) >= engine) return take_tensor_work();
    std::swap(engine_work_[static_cast<size_t>(below(engine))], engine_work_.back());
    std::unique_ptr<const LateWork> work = std::move(engine_work_.back());
    engine_work_.pop_back();
    return work;
  }

  void run_block() {
#ifndef __SANITIZE_ADDRESS__
    if (__start_tessera_shared != nullptr) {
      std::memset(__start_tessera_shared, kPoison, static_cast<size_t>(__stop_tessera_shared - __start_tessera_shared));
    }
#endif
    engine_work_.clear();
    block_state_.reset();
    num_tensor_work_ = 0;
    meetings_.assign(static_cast<size_t>(num_threads_ + kWarp - 1) / kWarp, {});
    num_alive_ = num_threads_, num_at_barrier_ = 0;
    for (int i = 0; i < num_threads_; ++i) {
      Thread& thread = thread_at(i);
      const auto at = static_cast<unsigned>(i);
      const dim3& size = current.block_size;
      thread.index = {at % size.x, at / size.x % size.y, at / size.x / size.y};
      thread.waits_for = nullptr, thread.is_ready = nullptr, thread.lack = nullptr;
      for (LateGroups& groups : thread.late) groups.open.clear(), groups.closed.clear();
      thread.tensor_work.clear();
      thread.fibre.start(run_thread);
    }
    // Threads in a random order, another for each block: results must not depend on it.
    order_.resize(static_cast<size_t>(num_threads_));
    std::iota(order_.begin(), order_.end(), 0);
    for (size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[random_() % i]);
    while (num_alive_ > 0) {
      bool has_run = false;
      for (const int i : order_) {
        Thread& thread = thread_at(i);
        if (thread.fibre.has_ended() || !thread.can_run()) continue;
        has_run = true;
        thread.waits_for = nullptr, thread.is_ready = nullptr, thread.lack = nullptr;
        running_ = &thread;
        current.thread = thread.index;
        thread.fibre.resume();
        if (!broken_rule_.empty()) return report();
        if (thread.fibre.has_ended()) {
          --num_alive_;
          std::ranges::for_each(thread.late[static_cast<int>(LateKind::kCopies)].closed, make_all);
          if (num_alive_ > 0 && num_at_barrier_ > 0) open_barrier();
        }
      }
      // Late enough where nobody can run; the tensor cores' work now and then before.
      std::unique_ptr<const LateWork> work;
      if (!has_run) {
        work = take_late_work();
      } else if (num_tensor_work_ > 0 && below(8) == 0) {
        work = take_tensor_work();
      }
      if (work != nullptr) {
        make_late(*work);
        if (!broken_rule_.empty()) return report();
      } else if (!has_run) {
        for (int i = 0; i < num_threads_ && broken_rule_.empty(); ++i) {
          Thread& thread = thread_at(i);
          if (thread.fibre.has_ended()) continue;
          current.thread = thread.index;
          broken_rule_ = words(thread.site) + ": waits for ever for " + thread.waits_for;
          if (thread.lack != nullptr) broken_rule_ += ": " + thread.lack(thread.context);
        }
        return report();
      }
    }
    if (!engine_work_.empty()) {
      broken_rule_ = "the block has ended while copies of the copy engine were under way";
    } else if (num_tensor_work_ > 0) {
      broken_rule_ = "the block has ended while work of the tensor cores was under way";
    } else if (block_state_ != nullptr) {
      broken_rule_ = block_state_->fault_at_end();
    }
    if (!broken_rule_.empty()) report();
  }

  void report() const {
    const uint3 &b = current.block, &t = current.thread;
    std::fprintf(stderr, "emulated GPU: block (%u, %u, %u), thread (%u, %u, %u): %s\n", b.x, b.y, b.z, t.x, t.y, t.z,
                 broken_rule_.c_str());
  }

  const ThreadCode* code_ = nullptr;
  unsigned char* shared_ = nullptr;
  size_t shared_bytes_ = 0;
  std::string broken_rule_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<int> order_;
  std::vector<std::vector<Meeting>> meetings_;  // by warp
  LateGroup engine_work_;
  std::unique_ptr<BlockState> block_state_;
  Thread* running_ = nullptr;
  int num_threads_ = 0, num_alive_ = 0, num_at_barrier_ = 0, num_tensor_work_ = 0;
  Site barrier_site_;
  std::minstd_rand random_{1};
};

Grid& the_grid() {
  static Grid grid;
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

bool run_grid(const ThreadCode& code, dim3 grid, dim3 block, size_t shared_bytes) {
  return the_grid().run(code, grid, block, shared_bytes);
}

void fail(std::string rule) {
  the_grid().fail(std::move(rule));
}

void sync_block(const Site& site) {
  the_grid().sync_block(site);
}

void collective(const Site& site, unsigned mask, void* payload, void (*complete)(void* const (&payloads)[kWarp])) {
  the_grid().collective(site, mask, payload, complete);
}

void* dynamic_shared() {
  return the_grid().dynamic_shared();
}

size_t dynamic_shared_bytes() {
  return the_grid().dynamic_shared_bytes();
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

void engine_work_late(std::unique_ptr<const LateWork> work) {
  the_grid().engine_work_late(std::move(work));
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
