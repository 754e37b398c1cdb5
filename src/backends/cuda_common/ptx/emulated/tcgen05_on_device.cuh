// SPDX-License-Identifier: Apache-2.0
#pragma once
// What ptx/tcgen05.cuh does on a GPU without tcgen05 (TESSERA_SM100_EMULATED): instructions check what they can when
// they are issued and post commands (tcgen05_commands.cuh). Narrower than on Blackwell: a block allocates once, one of
// its threads issues, and its first warpgroup loads and stores, whose values are there at once.
#include <cstdint>

#include "backends/cuda_common/ptx/emulated/tcgen05_commands.cuh"

namespace tessera::backends::cuda_common::ptx::emulated {

__device__ inline int lane_of_thread() {
  return static_cast<int>(threadIdx.x) % 32;
}

// By a whole warp.
__device__ inline void tcgen05_alloc(uint32_t* shared, int columns, int, const Site& site) {
  constexpr const char* kWhat = "tcgen05.alloc";
  const auto count = static_cast<uint32_t>(columns);
  if (count < kLeastTensorColumns || count > kTensorColumns || (count & (count - 1)) != 0) {
    fail_at(site, kWhat, "columns are no power of two from 32 to 512");
  }
  const int lane = lane_of_thread();
  if (lane == 0) {
    uint32_t at, tries = 0;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(at));
    for (at %= kTensorSlots; atomicCAS(&g_tensor_slots[at].is_taken, 0, 1) != 0; at = (at + 1) % kTensorSlots) {
      if (++tries > 10'000'000) fail_at(site, kWhat, "waits for ever: blocks have ended without giving columns back");
    }
    slot_of_block() = at;
  }
  __syncwarp();
  __threadfence();
  TensorSlot& slot = slot_here();
  auto* quadrants = reinterpret_cast<uint32_t*>(slot.quadrants);
  for (uint32_t i = static_cast<uint32_t>(lane); i < sizeof(slot.quadrants) / 4; i += 32) __stcg(&quadrants[i], 0);
  if (lane == 0) {
    // The last ones, so that no kernel may think that they begin at 0; a pair's blocks have the same.
    slot.first = kTensorColumns - count, slot.columns = count, slot.issuer = slot.num_blocks = slot.posted = 0;
    *shared = slot.first;
  }
  __threadfence();
  __syncwarp();
}
__device__ inline void tcgen05_relinquish_alloc_permit(int, const Site&) {}

__device__ inline void tcgen05_dealloc(uint32_t address, int columns, int, const Site& site) {
  constexpr const char* kWhat = "tcgen05.dealloc";
  TensorSlot& slot = slot_here();
  __syncwarp();
  if (lane_of_thread() != 0) return;
  if (address != slot.first || static_cast<uint32_t>(columns) != slot.columns) {
    fail_at(site, kWhat, "gives back columns that no allocation gave");
  }
  for (TensorSlot::Quadrant& quadrant : slot.quadrants) {
    if (__ldcg(&quadrant.made) != __ldcg(&slot.posted))
      fail_at(site, kWhat, "gives back columns while work is under way");
    for (uint32_t& loading : quadrant.loading) {
      if (__ldcg(&loading) != 0) fail_at(site, kWhat, "gives back columns while a load reads them");
    }
  }
  __threadfence();
  atomicExch(&slot.is_taken, 0);
}

// Calls act(slot) for this block, or for both of its pair.
template <class Act>
__device__ void for_each_slot(int num_blocks, const Act& act) {
  if (num_blocks == 1) return act(slot_here());
  const uint32_t first = cluster_rank_of_block() & ~1u;
  for (uint32_t i = 0; i < 2; ++i) act(slot_of_rank(first + i));
}

__device__ inline uint32_t cluster_blocks() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// What two blocks do together, one of them asks for.
__device__ inline void check_pair(const Site& site, const char* what, int num_blocks) {
  if (num_blocks == 1) return;
  if (cluster_blocks() % 2 != 0) fail_at(site, what, "cta_group::2 without a cluster of pairs");
  if (cluster_rank_of_block() % 2 != 0) fail_at(site, what, "is for the pair's even block to give");
}

// By the one thread that issues.
__device__ inline void post_command(const TensorCommand& command, const Site& site, const char* what) {
  const int num_blocks = static_cast<int>(command.num_blocks);
  const uint32_t thread = threadIdx.x + 1;
  const uint32_t before = atomicCAS(&slot_here().issuer, 0, thread);
  if (before != 0 && before != thread) fail_at(site, what, "two threads of a block issue, which is not modelled");
  for_each_slot(num_blocks, [&](TensorSlot& slot) {
    const uint32_t others = atomicCAS(&slot.num_blocks, 0, command.num_blocks);
    if (others != 0 && others != command.num_blocks)
      fail_at(site, what, "a kernel has instructions of both cta_groups");
    const uint32_t posted = __ldcg(&slot.posted);
    for (TensorSlot::Quadrant& quadrant : slot.quadrants) {
      while (posted - atomicAdd(&quadrant.made, 0) >= TensorSlot::kCommands) __nanosleep(1000);
    }
  });
  // Both blocks are done with what has the place: either may have left something in the even one's slot.
  for_each_slot(num_blocks, [&](TensorSlot& slot) {
    const uint32_t index = __ldcg(&slot.posted) % TensorSlot::kCommands;
    slot.arrived[index] = 0;
    for (PairDigest& digest : slot.b_scales[index]) digest.bits = PairDigest::kNone;
    slot.commands[index] = command;
    slot.commands[index].site = site;
  });
  __threadfence();
  for_each_slot(num_blocks, [](TensorSlot& slot) { atomicAdd(&slot.posted, 1); });
}

// Of a quadrant: whether some of the columns are marked.
__device__ inline bool has_marks(uint32_t (&marks)[kColumnWords], uint32_t first, uint32_t count) {
  for (uint32_t word = first / 32; word <= (first + count - 1) / 32; ++word) {
    if ((atomicAdd(&marks[word], 0) & column_bits(word, first, count)) != 0) return true;
  }
  return false;
}

__device__ inline void tcgen05_cp_scales(uint32_t address, uint64_t descriptor, int num_blocks, const Site& site) {
  constexpr const char* kWhat = "tcgen05.cp";
  check_pair(site, kWhat, num_blocks);
  TensorCommand command{TensorCommand::kCopy, static_cast<uint16_t>(num_blocks), 0, address};
  const char* fault = decode_shared_matrix(descriptor, command.a);
  if (fault != nullptr) fail_at(site, kWhat, fault);
  if (command.a.row_bytes != 16) fail_at(site, kWhat, "its source is swizzled");
  if (command.a.stride != 128) fail_at(site, kWhat, "its source's stride is not 8 lanes of 16 bytes");
  if (lane_of(address) != 0) fail_at(site, kWhat, "scales do not begin at lane 0");
  for_each_slot(num_blocks, [&](TensorSlot& slot) {
    if (!slot.has(address, 4)) fail_at(site, kWhat, "scales take columns which are not all allocated");
    for (TensorSlot::Quadrant& quadrant : slot.quadrants) {
      if (has_marks(quadrant.unread, address, 4)) fail_at(site, kWhat, "overwrites a column which holds sums");
    }
  });
  post_command(command, site, kWhat);
}

__device__ inline void tcgen05_mma_nvfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t descriptor, uint32_t a_scales,
                                         uint32_t b_scales, bool adds, int num_blocks, const Site& site) {
  constexpr const char* kWhat = "tcgen05.mma";
  const auto check = [&](const char* fault) {
    if (fault != nullptr) fail_at(site, kWhat, fault);
  };
  check_pair(site, kWhat, num_blocks);
  Nvfp4Instruction instruction{};
  check(decode_nvfp4_instruction(descriptor, num_blocks, instruction));
  const uint32_t n = static_cast<uint32_t>(instruction.n), b_columns = (n + 31) / 32;
  TensorCommand command{TensorCommand::kProduct, static_cast<uint16_t>(num_blocks), 0, d, a_scales, b_scales, n,
                        adds ? 1u : 0u};
  check(decode_shared_matrix(a, command.a));
  check(decode_shared_matrix(b, command.b));
  for (const SharedMatrix* matrix : {&command.a, &command.b}) {
    if (matrix->row_bytes > 16 && matrix->start % matrix->row_bytes + 32 > matrix->row_bytes) {
      fail_at(site, kWhat, "64 columns run over the end of an operand's swizzled rows");
    }
  }
  if (lane_of(d) != 0 || lane_of(a_scales) != 0 || lane_of(b_scales) != 0) {
    fail_at(site, kWhat, "sums or scales do not begin at lane 0");
  }
  const auto overlap = [](uint32_t first, uint32_t count, uint32_t other, uint32_t other_count) {
    return first < other + other_count && other < first + count;
  };
  if (overlap(d, n, a_scales, 4) || overlap(d, n, b_scales, b_columns) || overlap(a_scales, 4, b_scales, b_columns)) {
    fail_at(site, kWhat, "sums and scales overlap in tensor memory");
  }
  for_each_slot(num_blocks, [&](TensorSlot& slot) {
    if (!slot.has(d, n)) fail_at(site, kWhat, "sums take columns which are not all allocated");
    if (!slot.has(a_scales, 4)) fail_at(site, kWhat, "scales of A take columns which are not all allocated");
    if (!slot.has(b_scales, b_columns)) fail_at(site, kWhat, "scales of B take columns which are not all allocated");
    for (TensorSlot::Quadrant& quadrant : slot.quadrants) {
      if (has_marks(quadrant.loading, d, n)) {
        fail_at(site, kWhat, "writes a column of which a load has not been waited for");
      }
      if (adds) continue;
      if (has_marks(quadrant.unread, d, n)) fail_at(site, kWhat, "begins a column anew, whose sums nobody has read");
      for (uint32_t word = d / 32; word <= (d + n - 1) / 32; ++word) {
        atomicOr(&quadrant.unread[word], column_bits(word, d, n));
      }
    }
  });
  post_command(command, site, kWhat);
}

__device__ inline void tcgen05_commit(uint64_t* barrier, int num_blocks, uint32_t blocks, const Site& site) {
  constexpr const char* kWhat = "tcgen05.commit";
  check_pair(site, kWhat, num_blocks);
  if (num_blocks == 1) blocks = 1u << cluster_rank_of_block();
  if (blocks == 0 || blocks >> cluster_blocks() != 0) {
    fail_at(site, kWhat, "is for no block, or for one that the cluster lacks");
  }
  TensorCommand command{TensorCommand::kCommit, static_cast<uint16_t>(num_blocks), static_cast<uint16_t>(blocks)};
  command.barrier = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  post_command(command, site, kWhat);
}

// What loads and stores of a warp have in common; columns [address, address + count) of its own lanes.
__device__ inline TensorSlot::Quadrant& check_transfer(const Site& site, const char* what, uint32_t address,
                                                       uint32_t count) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = lane_of_thread();
  TensorSlot& slot = slot_here();
  const auto first = static_cast<uint32_t>(column_of(address));
  __syncwarp();
  if (__shfl_sync(~0u, address, 0) != address) fail_at(site, what, "lanes of a warp give different addresses");
  if (warp >= 4) fail_at(site, what, "is given by another warpgroup than the first, which is not modelled");
  if (lane_of(address) != 32 * warp) fail_at(site, what, "a warp reaches the 32 lanes of its own alone");
  if (!slot.has(first, count)) fail_at(site, what, "columns are not allocated");
  TensorSlot::Quadrant& quadrant = slot.quadrants[warp];
  const uint32_t posted = atomicAdd(&slot.posted, 0);
  for (uint32_t at = __ldcg(&quadrant.made) + static_cast<uint32_t>(lane); static_cast<int>(posted - at) > 0;
       at += 32) {
    const TensorCommand& command = slot.commands[at % TensorSlot::kCommands];
    const uint32_t d = __ldcg(&command.d), n = __ldcg(&command.n);
    if (__ldcg(&command.kind) == TensorCommand::kProduct && first < d + n && d < first + count) {
      fail_at(site, what, "a column belongs to a product that is under way");
    }
  }
  if (lane < static_cast<int>(kColumnWords) &&
      (__ldcg(&quadrant.uncommitted[lane]) & column_bits(static_cast<uint32_t>(lane), first, count)) != 0) {
    fail_at(site, what, "a column was written by a product that no commit has followed");
  }
  return quadrant;
}

__device__ inline void tcgen05_ld(uint32_t* registers, int count, uint32_t address, const Site& site) {
  constexpr const char* kWhat = "tcgen05.ld";
  const auto columns = static_cast<uint32_t>(count), first = static_cast<uint32_t>(column_of(address));
  TensorSlot::Quadrant& quadrant = check_transfer(site, kWhat, address, columns);
  need_written(quadrant, first, columns, lane_of_thread(), site, kWhat, "a column is read where nothing was written");
  mark_columns(quadrant.loading, first, columns, lane_of_thread());
  for (uint32_t i = 0; i < columns; ++i) registers[i] = __ldcg(&slot_here().cells[first + i][threadIdx.x]);
  __syncwarp();
}

__device__ inline void tcgen05_st(const uint32_t* registers, int count, uint32_t address, const Site& site) {
  const auto columns = static_cast<uint32_t>(count), first = static_cast<uint32_t>(column_of(address));
  TensorSlot::Quadrant& quadrant = check_transfer(site, "tcgen05.st", address, columns);
  for (uint32_t i = 0; i < columns; ++i) __stcg(&slot_here().cells[first + i][threadIdx.x], registers[i]);
  mark_columns(quadrant.written, first, columns, lane_of_thread());
  __syncwarp();
}

__device__ inline void tcgen05_wait_ld(const Site&) {
  TensorSlot::Quadrant& quadrant = slot_here().quadrants[threadIdx.x / 32];
  __syncwarp();
  const int lane = lane_of_thread();
  if (lane < static_cast<int>(kColumnWords)) {
    atomicAnd(&quadrant.unread[lane], ~atomicExch(&quadrant.loading[lane], 0));
  }
  __threadfence();
  __syncwarp();
}
__device__ inline void tcgen05_wait_st(const Site&) {
  __syncwarp();
}

}  // namespace tessera::backends::cuda_common::ptx::emulated
