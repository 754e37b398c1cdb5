// SPDX-License-Identifier: Apache-2.0
#pragma once
// A thread block of the emulated GPU: each thread is a fibre that runs until it waits for others. Barriers and
// warp-wide instructions check what a GPU leaves undefined: lanes that meet at different places of the source, wait for
// a lane that has ended, or wait for ever. Clusters of blocks run one after another; the blocks of one run together.
#include <cuda_runtime_api.h>

#include <memory>
#include <source_location>
#include <string>

namespace tessera::device::emulated {

using Site = std::source_location;
constexpr int kWarp = 32;

// What the running thread reads of itself.
struct Current {
  uint3 thread, block;
  dim3 block_size, grid_size;
  int rank = 0;  // of the block in its cluster
  int index() const { return static_cast<int>((thread.z * block_size.y + thread.y) * block_size.x + thread.x); }
  int lane() const { return index() % kWarp; }
};
extern Current current;

// A kernel with its arguments; called once per thread.
class ThreadCode {
 public:
  virtual ~ThreadCode() = default;
  virtual void run() const = 0;
};

// Runs the grid's blocks with `shared_bytes` of dynamic shared memory each, in clusters of `cluster` neighbours along
// x, which divides grid.x. False where a thread broke a rule: a line on stderr has said which and where, and the rest
// of the grid was not run. Shared variables that kernels declare are one for a cluster: its kernels have none.
bool run_grid(const ThreadCode& code, dim3 grid, dim3 block, size_t shared_bytes, int cluster = 1);

// The rest is for running threads.

// Ends the grid: `rule` was broken. Does not return.
[[noreturn]] void fail(std::string rule);
// A place of the source for people: file and line.
std::string words(const Site& site);
// Waits for all threads of the block that have not ended.
void sync_block(const Site& site);
// Waits for all threads of the cluster that have not ended.
void sync_cluster(const Site& site);
// How often they have met there.
int num_cluster_barriers();
int cluster_size();
// Waits for the lanes of `mask`, this one among them, at the same place. The last to arrive calls complete() with every
// lane's payload (null: not in the mask); payloads live until each lane has returned.
void collective(const Site& site, unsigned mask, void* payload, void (*complete)(void* const (&payloads)[kWarp]));
// The way that this thread has come since its warp met last, there or at a barrier of all: a digest of the code it went
// through in sources compiled with -fsanitize-coverage=trace-pc. Lanes of different ways have parted; a GPU brings them
// together again at a warp barrier and need not do so before.
uint64_t way_of_thread();
// While one lives its thread's way stays as it is: inside an instruction's emulation.
class Aside {
 public:
  Aside();
  ~Aside();
  Aside(const Aside&) = delete;
  Aside& operator=(const Aside&) = delete;
};
void* dynamic_shared();
size_t dynamic_shared_bytes();
// That of the cluster's block `rank`; breaks a rule where that has ended, or another may not have begun.
void* dynamic_shared_of(int rank);
// 0 to below - 1, by chance.
int random_below(int below);

// What an instruction does some time after it was issued: at once or as late as waiting allows, by chance, so that
// whoever reads or writes too early is found out.
class LateWork {
 public:
  virtual ~LateWork() = default;
  virtual void make() const = 0;
};
// A thread's asynchronous copies, its warpgroup's products, its loads from and stores to tensor memory: each kind in
// groups that complete in order.
enum class LateKind { kCopies, kProducts, kTensorLoads, kTensorStores };
void work_late(LateKind kind, std::unique_ptr<const LateWork> work);
// Ends a group.
void commit_late(LateKind kind);
// Waits until at most `newest` groups are under way.
void wait_for_late(LateKind kind, int newest);
// A copy of one piece by its thread, cp.async.
void copy_async(void* target, const void* source, size_t bytes);

// Work of the copy engine, for the block, or what the tensor cores signal, in no order: nobody waits for it but through
// what it signals when it is made. `what` it is, in words.
void engine_work_late(std::unique_ptr<const LateWork> work, const char* what);
// Work of the tensor cores: what one thread gives them is made in that order.
void tensor_work_late(std::unique_ptr<const LateWork> work);
// Waits until is_ready(context); `what` the thread waits for, in words, and what it lacks, asked when nothing is left
// that could bring it (null: nothing to say).
void wait_until(const Site& site, bool (*is_ready)(const void* context), const void* context, const char* what,
                std::string (*lack)(const void* context) = nullptr);

// What instructions keep for a block beside its memory: made when it is first asked for, gone with the block. There is
// one kind of it, tensor memory.
class BlockState {
 public:
  virtual ~BlockState() = default;
  // What a block that ends now has left undone; empty: nothing.
  virtual std::string fault_at_end() const = 0;
};
BlockState& block_state(std::unique_ptr<BlockState> (*make)());
// Does something as if block `rank` of the cluster did it: its shared memory, its state.
template <class Do>
void as_block(int rank, const Do& act) {
  struct Back {
    int rank = current.rank;
    ~Back() { current.rank = rank; }
  } back;
  current.rank = rank;
  act();
}

}  // namespace tessera::device::emulated
