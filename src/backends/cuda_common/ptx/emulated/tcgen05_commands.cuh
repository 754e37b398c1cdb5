// SPDX-License-Identifier: Apache-2.0
#pragma once
// tcgen05's work in software on a GPU that lacks it (the CMake option TESSERA_SM100_EMULATED): a queue of commands for
// each thread block, and who makes them. One thread issues copies of scales, products and commits and goes on, as on
// Blackwell; what it issued is made in order by the four warps of the block's first warpgroup while they wait at a
// barrier (bulk_copy.cuh), each for its own 32 lanes of tensor memory, at a pace of its own and with delays by chance.
// So these warps have to wait at barriers as whole warps, and for sums before they end. Tensor memory and the queue lie
// in global memory, a TensorSlot for each block. Descriptors and sums are those of the emulated GPU (tcgen05_decode.h,
// tcgen05_sums.h); what breaks a rule ends the grid with a line that names it.
#include <cstdint>
#include <cstdio>

#include "backends/cuda_common/ptx/emulated/pair_digest.h"
#include "backends/cuda_common/ptx/emulated/tcgen05_decode.h"
#include "backends/cuda_common/ptx/emulated/tcgen05_sums.h"

// What a failed assert() calls in device code (CUDA C++ Programming Guide, "Assertion"); <cassert> has it not where
// NDEBUG is set.
extern "C" __device__ void __assertfail(const char* assertion, const char* file, unsigned line, const char* function,
                                        size_t char_size);

namespace tessera::backends::cuda_common::ptx::emulated {

// The place of the source that gives an instruction.
struct Site {
  const char* file;
  unsigned line;
  __device__ static constexpr Site current(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE()) {
    return {file, line};
  }
};

__device__ inline void fail_at(const Site& site, const char* what, const char* rule) {
  __assertfail(rule, site.file, site.line, what, sizeof(char));
}

struct TensorCommand {
  enum Kind : uint32_t { kCopy, kProduct, kCommit };
  uint32_t kind;
  uint16_t num_blocks;
  uint16_t told;  // of a commit: blocks of the cluster whose barriers count an arrival, bit r for rank r
  uint32_t d, a_scales, b_scales;  // columns; of a copy `d` is where it goes
  uint32_t n, adds;
  uint32_t barrier;  // of a commit: its address in shared memory
  SharedMatrix a, b;
  Site site;
};
static_assert(sizeof(TensorCommand) == 80);

// Bits for columns.
constexpr uint32_t kColumnWords = 16;
// Of word `word`, those of columns [first, first + count).
__device__ inline uint32_t column_bits(uint32_t word, uint32_t first, uint32_t count) {
  const uint32_t begin = max(first, 32 * word), end = min(first + count, 32 * word + 32);
  if (begin >= end) return 0;
  return (~0u >> (32 - (end - begin))) << (begin - 32 * word);
}

constexpr uint32_t kTensorColumns = 512, kLeastTensorColumns = 32;

// Of one thread block.
struct TensorSlot {
  static constexpr uint32_t kLanes = 128, kCommands = 512;

  // 32 lanes, which one warp works for.
  struct Quadrant {
    uint32_t made;                       // commands
    uint32_t written[kColumnWords];      // since they were allocated
    uint32_t unread[kColumnWords];       // sums were asked for which nobody has loaded
    uint32_t loading[kColumnWords];      // loads that have not been waited for
    uint32_t uncommitted[kColumnWords];  // products that no commit has followed
  };

  uint32_t is_taken, first, columns;  // the allocation
  uint32_t issuer;                    // the thread, + 1
  uint32_t num_blocks;                // that work together, of the first command
  uint32_t posted;                    // commands
  Quadrant quadrants[4];
  uint32_t arrived[kCommands];  // warps that have come to a commit
  // Of a product of a pair, in its even block's slot: what 32 lanes of the block that came first had as B's scales.
  PairDigest b_scales[kCommands][4];
  alignas(16) TensorCommand commands[kCommands];
  uint32_t cells[kTensorColumns][kLanes];

  __device__ bool has(uint32_t at, uint32_t count) const { return at >= first && at + count <= first + columns; }
};

// More than multiprocessors: their kernels take nearly all of one's shared memory.
constexpr int kTensorSlots = 160;
static __device__ TensorSlot g_tensor_slots[kTensorSlots];

__device__ inline uint32_t cluster_rank_of_block() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Where block `rank` of the cluster has what is at `address` here.
__device__ inline uint32_t address_in_block(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// An address of the cluster's window: a block's own has its rank in the upper bits, which descriptors do not have.
__device__ inline uint4 load_shared(uint32_t address) {
  uint4 words;
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address)
               : "memory");
  return words;
}

__device__ inline uint32_t& slot_of_block() {
  __shared__ uint32_t s_slot;
  return s_slot;
}
__device__ inline TensorSlot& slot_here() {
  return g_tensor_slots[slot_of_block()];
}
__device__ inline TensorSlot& slot_of_rank(uint32_t rank) {
  const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(&slot_of_block()));
  uint32_t slot;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(slot) : "r"(address_in_block(here, rank)) : "memory");
  return g_tensor_slots[slot];
}

// 64 codes of a row as halves, four to a word.
struct RowOfHalves {
  uint32_t words[16] = {};

  __device__ void load(const SharedMatrix& matrix, uint32_t row, uint32_t rank) {
#pragma unroll
    for (uint32_t part = 0; part < 2; ++part) {
      const uint4 codes = load_shared(address_in_block(matrix.address(row, 16 * part), rank));
      expand(codes.x, words[8 * part], words[8 * part + 1]), expand(codes.y, words[8 * part + 2], words[8 * part + 3]);
      expand(codes.z, words[8 * part + 4], words[8 * part + 5]);
      expand(codes.w, words[8 * part + 6], words[8 * part + 7]);
    }
  }

 private:
  __device__ static void expand(uint32_t codes, uint32_t& low, uint32_t& high) {
    low = high = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      low |= (static_cast<uint32_t>(halves_of_e2m1(codes >> 4 * i & 15)) & 255) << 8 * i;
      high |= (static_cast<uint32_t>(halves_of_e2m1(codes >> (16 + 4 * i) & 15)) & 255) << 8 * i;
    }
  }
};

// By a warp, as below.
__device__ inline void need_written(const TensorSlot::Quadrant& quadrant, uint32_t first, uint32_t count, int lane,
                                    const Site& site, const char* what, const char* rule) {
  if (lane < static_cast<int>(kColumnWords)) {
    const uint32_t bits = column_bits(static_cast<uint32_t>(lane), first, count);
    if ((__ldcg(&quadrant.written[lane]) & bits) != bits) fail_at(site, what, rule);
  }
}
__device__ inline void mark_columns(uint32_t (&marks)[kColumnWords], uint32_t first, uint32_t count, int lane) {
  if (lane < static_cast<int>(kColumnWords)) {
    atomicOr(&marks[lane], column_bits(static_cast<uint32_t>(lane), first, count));
  }
}

// 32x128b.warpx4: each 32 lanes get a copy.
__device__ inline void make_copy(TensorSlot& slot, const TensorCommand& command, int warp, int lane) {
  const uint32_t from = command.a.address(static_cast<uint32_t>(lane), 0);
  const uint4 words = load_shared(address_in_block(from, cluster_rank_of_block()));
  const int at = 32 * warp + lane;
  __stcg(&slot.cells[command.d][at], words.x), __stcg(&slot.cells[command.d + 1][at], words.y);
  __stcg(&slot.cells[command.d + 2][at], words.z), __stcg(&slot.cells[command.d + 3][at], words.w);
  mark_columns(slot.quadrants[warp].written, command.d, 4, lane);
}

// Each block of a pair multiplies by its own copy of all of B's scales, at a pace of its own: the second warp of the
// two that have the same lanes compares. `digest` is of this lane's scales.
__device__ inline void check_scales_of_pair(const TensorCommand& command, uint32_t index, int warp, int lane,
                                            uint32_t digest) {
  if (command.num_blocks == 1) return;
  for (int step = 16; step > 0; step /= 2) digest += __shfl_xor_sync(~0u, digest, step);
  if (lane != 0) return;
  PairDigest& of_pair = slot_of_rank(cluster_rank_of_block() & ~1u).b_scales[index][warp];
  const uint32_t before = atomicCAS(&of_pair.bits, PairDigest::kNone, PairDigest::bits_of(digest));
  if (!PairDigest::agrees(before, digest))
    fail_at(command.site, "tcgen05.mma", "scales of B in a pair's odd block are not those in its even one");
}

// Rows 32 warp to 32 warp + 31 of the block's 128, a row for each lane; a lane fetches columns for all.
__device__ inline void make_product(TensorSlot& slot, const TensorCommand& command, uint32_t index, int warp,
                                    int lane) {
  constexpr const char* kWhat = "tcgen05.mma";
  TensorSlot::Quadrant& quadrant = slot.quadrants[warp];
  const uint32_t n = command.n, n_each = n / command.num_blocks;
  const uint32_t rank = cluster_rank_of_block(), first_rank = command.num_blocks == 1 ? rank : rank & ~1u;
  need_written(quadrant, command.a_scales, 4, lane, command.site, kWhat, "scales of A were not written");
  need_written(quadrant, command.b_scales, (n + 31) / 32, lane, command.site, kWhat, "scales of B were not written");
  if (command.adds != 0)
    need_written(quadrant, command.d, n, lane, command.site, kWhat, "adds where nothing was written");
  const uint32_t row = static_cast<uint32_t>(32 * warp + lane);
  const auto bytes_of = [](uint32_t word, uint8_t(&bytes)[kGroupsOfProduct]) {
#pragma unroll
    for (int i = 0; i < kGroupsOfProduct; ++i) bytes[i] = static_cast<uint8_t>(word >> 8 * i);
  };
  RowOfHalves a;
  a.load(command.a, row, rank);
  uint8_t a_scales[kGroupsOfProduct];
  bytes_of(__ldcg(&slot.cells[command.a_scales + static_cast<uint32_t>(warp)][row]), a_scales);
  uint32_t digest = 0;
  for (uint32_t begin = 0; begin < n; begin += 32) {
    const uint32_t mine = begin + static_cast<uint32_t>(lane);
    RowOfHalves b;
    uint32_t scales = 0;
    if (mine < n) {
      b.load(command.b, mine % n_each, first_rank + mine / n_each);
      scales = __ldcg(&slot.cells[command.b_scales + begin / 32][row]);  // of lane 32 warp + mine % 32
      digest += digest_of_scales(mine, scales);
    }
#pragma unroll 1
    for (uint32_t i = 0; i < 32 && begin + i < n; ++i) {
      int groups[kGroupsOfProduct] = {};
#pragma unroll
      for (int word = 0; word < 16; ++word) {
        const uint32_t other = __shfl_sync(~0u, b.words[word], static_cast<int>(i));
        groups[word / 4] = __dp4a(static_cast<int>(a.words[word]), static_cast<int>(other), groups[word / 4]);
      }
      uint8_t b_scales[kGroupsOfProduct];
      bytes_of(__shfl_sync(~0u, scales, static_cast<int>(i)), b_scales);
      uint32_t& sum = slot.cells[command.d + begin + i][row];
      __stcg(&sum, add_scaled_groups(command.adds != 0 ? __ldcg(&sum) : 0, groups, a_scales, b_scales));
    }
  }
  check_scales_of_pair(command, index, warp, lane, digest);
  mark_columns(quadrant.written, command.d, n, lane);
  mark_columns(quadrant.uncommitted, command.d, n, lane);
}

// The last warp of both blocks of a pair that comes to it arrives.
__device__ inline void make_commit(TensorSlot& slot, const TensorCommand& command, uint32_t index, int warp, int lane) {
  if (lane < static_cast<int>(kColumnWords)) atomicExch(&slot.quadrants[warp].uncommitted[lane], 0);
  __threadfence();
  __syncwarp();
  if (lane != 0) return;
  const uint32_t rank = cluster_rank_of_block(), first_rank = command.num_blocks == 1 ? rank : rank & ~1u;
  TensorSlot& first = command.num_blocks == 1 ? slot : slot_of_rank(first_rank);
  if (atomicAdd(&first.arrived[index], 1) + 1 < 4u * command.num_blocks) return;
  __threadfence();
  for (uint32_t i = 0; command.told >> i != 0; ++i) {
    if ((command.told >> i & 1) == 0) continue;
    asm volatile(
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address_in_block(command.barrier, i))
        : "memory");
  }
}

// By one of the first four warps, whole: makes the next command, if there is one.
__device__ __attribute__((noinline)) inline bool make_next_command(int warp, int lane) {
  TensorSlot& slot = slot_here();
  uint32_t made = 0, posted = 0;
  if (lane == 0) made = __ldcg(&slot.quadrants[warp].made), posted = atomicAdd(&slot.posted, 0);
  made = __shfl_sync(~0u, made, 0), posted = __shfl_sync(~0u, posted, 0);
  if (made == posted) return false;
  __threadfence();
  const uint32_t chance = static_cast<uint32_t>(clock64()) * 2654435761u >> 16;
  if (__shfl_sync(~0u, chance, 0) % 8 == 0) __nanosleep(__shfl_sync(~0u, chance, 0) >> 3 & 4095);
  const uint32_t index = made % TensorSlot::kCommands;
  alignas(16) TensorCommand command;
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    reinterpret_cast<uint4*>(&command)[i] = __ldcg(reinterpret_cast<const uint4*>(&slot.commands[index]) + i);
  }
  if (command.kind == TensorCommand::kCopy) {
    make_copy(slot, command, warp, lane);
  } else if (command.kind == TensorCommand::kProduct) {
    make_product(slot, command, index, warp, lane);
  } else {
    make_commit(slot, command, index, warp, lane);
  }
  __threadfence();
  __syncwarp();
  if (lane == 0) atomicExch(&slot.quadrants[warp].made, made + 1);
  return true;
}

__device__ inline uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Waits for a phase of the barrier at `address`; the first four warps work meanwhile.
__device__ inline void wait_and_work(uint32_t address, int parity, const Site& site) {
  constexpr uint64_t kMost = 20'000'000'000;
  const uint64_t begin = nanoseconds();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const bool works = warp < 4;
  if (works) __syncwarp();
  while (true) {
    uint32_t has_ended;
    asm volatile(
        "{\n.reg .pred ended;\nmbarrier.test_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
        "selp.u32 %0, 1, 0, ended;\n}"
        : "=r"(has_ended)
        : "r"(address), "r"(parity)
        : "memory");
    if (works) has_ended = static_cast<uint32_t>(__all_sync(~0u, static_cast<int>(has_ended)));
    if (has_ended != 0) return;
    if (works && make_next_command(warp, lane)) continue;
    if (nanoseconds() - begin > kMost) {
      printf("block %d, thread %d: the barrier at %u of shared memory, parity %d\n", static_cast<int>(blockIdx.x),
             static_cast<int>(threadIdx.x), address, parity);
      fail_at(site, "mbarrier.test_wait", "waits for ever for a barrier in shared memory");
    }
    __nanosleep(100);
  }
}

}  // namespace tessera::backends::cuda_common::ptx::emulated
