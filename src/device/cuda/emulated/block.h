// SPDX-License-Identifier: Apache-2.0
#pragma once
// A thread block of the emulated GPU: each thread is a fibre that runs until it waits for others. Barriers and
// warp-wide instructions check what a GPU leaves undefined: lanes that meet at different places of the source, wait for
// a lane that has ended, or wait for ever. Blocks run one after another.
#include <cuda_runtime_api.h>

#include <source_location>

namespace tessera::device::emulated {

using Site = std::source_location;
constexpr int kWarp = 32;

// What the running thread reads of itself.
struct Current {
  uint3 thread, block;
  dim3 block_size, grid_size;
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

// Runs the grid's blocks with `shared_bytes` of dynamic shared memory each. False where a thread broke a rule: a line
// on stderr has said which and where, and the rest of the grid was not run.
bool run_grid(const ThreadCode& code, dim3 grid, dim3 block, size_t shared_bytes);

// The rest is for running threads.

// Ends the grid: `rule` was broken. Does not return.
[[noreturn]] void fail(const char* rule);
// Waits for all threads of the block that have not ended.
void sync_block(const Site& site);
// Waits for the lanes of `mask`, this one among them, at the same place. The last to arrive calls complete() with every
// lane's payload (null: not in the mask); payloads live until each lane has returned.
void collective(const Site& site, unsigned mask, void* payload, void (*complete)(void* const (&payloads)[kWarp]));
void* dynamic_shared();

// A copy that the thread doesn't wait for: made at once or as late as waiting allows, by chance, so that whoever reads
// too early or writes too early is found out.
void copy_async(void* target, const void* source, size_t bytes);
// Ends a group of copies.
void commit_copies();
// Waits until at most `newest` groups are under way.
void wait_for_copies(int newest);

}  // namespace tessera::device::emulated
