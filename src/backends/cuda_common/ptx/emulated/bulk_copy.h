// SPDX-License-Identifier: Apache-2.0
#pragma once
// What ptx/bulk_copy.cuh does on the emulated GPU. A barrier's 64 bits: arrivals of a phase, arrivals still to come,
// the phase's number, the bytes announced that have not come, and how often the cluster had met when it was made.
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "backends/cuda_common/ptx/emulated/shared_window.h"
#include "device/cuda/emulated/block.h"

namespace tessera::backends::cuda_common::ptx::emulated {

struct BarrierState {
  uint32_t count : 11, pending : 11, phase : 10;
  int32_t bytes : 22;
  uint32_t meeting : 10;
};
static_assert(sizeof(BarrierState) == sizeof(uint64_t));

inline BarrierState load_barrier(const uint64_t* bits) {
  BarrierState state;
  std::memcpy(&state, bits, sizeof state);
  return state;
}

inline void store_barrier(uint64_t* bits, BarrierState state) {
  if (state.pending == 0 && state.bytes == 0) state.pending = state.count, state.phase = (state.phase + 1) & 1023;
  std::memcpy(bits, &state, sizeof state);
}

inline uint32_t meeting_now() {
  return static_cast<uint32_t>(device::emulated::num_cluster_barriers()) & 1023;
}

inline void init_barrier(uint64_t* bits, int count) {
  if (count < 1 || count > 1024) device::emulated::fail("a barrier for no thread, or for more than a block has");
  BarrierState state{};
  state.count = state.pending = static_cast<uint32_t>(count) & 2047;
  state.meeting = meeting_now();
  store_barrier(bits, state);
}

// Memory that nobody has written has all bits set.
inline bool is_made(const uint64_t* bits) {
  return *bits != ~uint64_t{0};
}

inline void arrive(uint64_t* bits, int bytes) {
  const device::emulated::Aside aside;
  if (!is_made(bits)) device::emulated::fail("arrives at a barrier that nobody has made");
  BarrierState state = load_barrier(bits);
  if (state.pending == 0) device::emulated::fail("more threads arrive at a barrier than it counts");
  state.bytes += bytes;
  state.pending = (state.pending - 1) & 2047;
  store_barrier(bits, state);
}

// Where block `rank` of the cluster has what is at `here` in this block's shared memory.
inline char* place_in_block(const void* here, int rank) {
  const int64_t offset = shared_offset(here);
  if (offset < 0) device::emulated::fail("a place of another block that is not in dynamic shared memory");
  return static_cast<char*>(device::emulated::dynamic_shared_of(rank)) + offset;
}
// The barrier that it has there, which has to be made: the cluster has met since.
inline uint64_t* barrier_in_block(const uint64_t* here, int rank) {
  auto* const there = reinterpret_cast<uint64_t*>(place_in_block(here, rank));
  const bool is_other = rank != device::emulated::current.rank;
  if (!is_made(there) || (is_other && load_barrier(there).meeting == meeting_now())) {
    device::emulated::fail("arrives at a barrier that another block may not have made: the cluster has not met since");
  }
  return there;
}
inline void arrive_at(const uint64_t* here, int rank) {
  const device::emulated::Aside aside;
  arrive(barrier_in_block(here, rank), 0);
}
// Of a set of blocks, bit r for rank r: not none, and none that the cluster does not have.
inline bool are_of_cluster(uint32_t blocks) {
  return blocks != 0 && blocks >> device::emulated::cluster_size() == 0;
}
// Calls act(rank) for each.
template <class Act>
void for_each_rank(uint32_t blocks, const Act& act) {
  for (int rank = 0; blocks >> rank != 0; ++rank) {
    if ((blocks >> rank & 1) != 0) act(rank);
  }
}

struct BarrierPhase {
  const uint64_t* bits;
  int parity;
};

// What a barrier lacks to end its phase.
inline std::string lack_of(const BarrierPhase& awaited) {
  const BarrierState state = load_barrier(awaited.bits);
  return "the one at byte " + std::to_string(shared_offset(awaited.bits)) + " is in phase " +
         std::to_string(state.phase) + ", parity " + std::to_string(awaited.parity % 2) + " awaited, " +
         std::to_string(state.pending) + " of " + std::to_string(state.count) + " arrivals missing, " +
         std::to_string(state.bytes) + " bytes announced and not copied";
}

inline void wait(const uint64_t* bits, int parity, const device::emulated::Site& site) {
  const device::emulated::Aside aside;
  if (!is_made(bits)) {
    device::emulated::fail(device::emulated::words(site) + ": waits for a barrier that nobody has made");
  }
  BarrierPhase awaited{bits, parity};
  device::emulated::wait_until(
      site,
      [](const void* context) {
        const auto& phase = *static_cast<const BarrierPhase*>(context);
        return load_barrier(phase.bits).phase % 2 != phase.parity % 2;
      },
      &awaited, "a barrier in shared memory",
      [](const void* context) { return lack_of(*static_cast<const BarrierPhase*>(context)); });
}

// To block `rank` of the cluster, whose addresses these are.
class BulkCopy final : public device::emulated::LateWork {
 public:
  BulkCopy(int rank, void* shared, const void* global, int bytes, uint64_t* arrived)
      : rank_(rank), shared_(shared), global_(global), bytes_(bytes), arrived_(arrived) {}
  void make() const override {
    device::emulated::dynamic_shared_of(rank_);  // is it still there
    std::memcpy(shared_, global_, static_cast<size_t>(bytes_));
    BarrierState state = load_barrier(arrived_);
    state.bytes -= bytes_;
    store_barrier(arrived_, state);
  }

 private:
  int rank_;
  void* shared_;
  const void* global_;
  int bytes_;
  uint64_t* arrived_;
};

constexpr const char* kCopy = "a copy of the copy engine";

inline void check_bulk_copy(const void* shared, const void* global, int bytes) {
  const auto is_aligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  if (!is_aligned(shared) || !is_aligned(global) || bytes <= 0 || bytes % 16 != 0) {
    device::emulated::fail("a bulk copy is misaligned");
  }
}

inline void copy_bulk(void* shared, const void* global, int bytes, uint64_t* arrived) {
  check_bulk_copy(shared, global, bytes);
  const int rank = device::emulated::current.rank;
  device::emulated::engine_work_late(std::make_unique<BulkCopy>(rank, shared, global, bytes, arrived), kCopy);
}

// Each block gets its bytes at a time of its own.
inline void copy_bulk_to(uint32_t blocks, void* shared, const void* global, int bytes, uint64_t* arrived) {
  check_bulk_copy(shared, global, bytes);
  if (!are_of_cluster(blocks)) device::emulated::fail("a bulk copy to no block, or to one that the cluster lacks");
  for_each_rank(blocks, [&](int rank) {
    void* const there = place_in_block(shared, rank);
    uint64_t* const barrier = barrier_in_block(arrived, rank);
    device::emulated::engine_work_late(std::make_unique<BulkCopy>(rank, there, global, bytes, barrier), kCopy);
  });
}

}  // namespace tessera::backends::cuda_common::ptx::emulated
