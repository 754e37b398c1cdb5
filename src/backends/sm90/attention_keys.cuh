// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a thread block of attention.cu keeps in shared memory, and the warpgroups that fill it: keys in BF16 in blocks
// of 64 channels, part after part, and queries.
#include <cstdint>

#include "backends/cuda_common/key_pairs.cuh"
#include "backends/cuda_common/ptx/bulk_copy.cuh"
#include "backends/cuda_common/ptx/cp_async.cuh"
#include "backends/cuda_common/ptx/prefetch.cuh"
#include "backends/cuda_common/ptx/wgmma.cuh"
#include "backends/sm90/attention_walk.cuh"

namespace tessera::backends::sm90::attention_wide {

namespace ptx = cuda_common::ptx;

struct Shared {
  char queries[kBlocks][kHeads * kRowBytes];
  char keys[kBlocks][kPart * kRowBytes];
  char probabilities[kPart / kGroup][kHeads * kRowBytes];  // of 64 keys each
  // Of the parts that are worked on, and of the next.
  static constexpr int kParts = 4;
  const uint8_t* addresses[kParts][kPart];
  uint16_t scales[kParts][kPart][8];  // a block's each: cuda_common::pair_scale's first
  Part parts[kParts];
  bool has_great_scale[kParts];          // some scale has a second factor
  float max[2][kHeads], sum[2][kHeads];  // by consumers
  ptx::SharedBarrier full[kBlocks], free[kBlocks], found[kParts], have_scales[kParts], queries_free, have_max,
      have_probabilities;
};

static_assert(sizeof(Shared) <= (227 << 10));

// At a block of channels one lane of a producers' warp arrives for all of it; at the last block, and with what is found
// of keys, which lanes read, every lane: a warp's own order is not what racecheck follows.
constexpr int kProducerWarps = kProducers / kWarp;
__device__ constexpr int arrivals_of(int block) {
  return block + 1 < kBlocks ? kProducerWarps : kProducers;
}

// Where channels 16 t + 4 k + [0, 4) of a row lie in a block: a product's step k has them of every t. From that of an
// even k that of k + 1; from that of t < 2 that of t + 2, if asked for.
__device__ inline int place_of(unsigned row, unsigned t, unsigned k) {
  return static_cast<int>(row * kRowBytes + ((2 * k + t / 2) ^ row % 8) * 16 + t % 2 * 8);
}
__device__ inline int place_of_next_step(int place) {
  return place ^ 32;
}
__device__ inline int place_of_next_two(int place, int is_next) {
  return place ^ is_next * 16;
}

// Eight bytes of a key: as many channels in FP8, half as many in BF16.
using Piece = uint32_t[2];

// The order in which producers bring a part: a step is 64 bytes of each key, the step-th of them. kAhead: steps that
// are on their way; with four of BF16 entries the compiler spills what they bring.
template <ops::EntryFormat kFormat>
struct Steps {
  static constexpr bool kHasFp8 = EntryBytes<kFormat>::kHasFp8;
  static constexpr int kCount = kHasFp8 ? kBlocks + 1 : 2 * kBlocks, kAhead = kHasFp8 ? 3 : 2;
  static_assert(kCount % kAhead == 0);
  __device__ static constexpr bool is_fp8(int step) { return kHasFp8 && step < kBlocks - 1; }
  __device__ static constexpr int block(int step) {
    return !kHasFp8 ? step / 2 : step < kBlocks - 1 ? step : kBlocks - 1;
  }
  __device__ static constexpr int half(int step) { return kHasFp8 ? step / kBlocks : step % 2; }
  __device__ static constexpr bool is_first(int step) { return half(step) == 0; }
  __device__ static constexpr bool is_last(int step) { return is_fp8(step) || half(step) == 1; }
};

// Brings keys: some 930 instructions a warp for a part of 128, of which 448 make BF16 of codes and 112 look for NaNs;
// finding keys are some 240 more, of four warps at a time. All steps of a part are unrolled, so that offsets are in the
// instructions, and what decides branches is one value for a warp (of_warp), so that ptxas needs no convergence
// barriers.
template <ops::EntryFormat kFormat>
class Producer {
 public:
  __device__ Producer(const Job& job, Shared& s)
      : job_(job), s_(s), ahead_(job), thread_(threadIdx.x - kConsumers), lane_(thread_ % kWarp) {
    const unsigned row = first_key(), u = thread_ % 8;
    char* keys = &s.keys[0][0];
    const int place = place_of(row, u / 2, u % 2 * 2), whole_place = place_of(row, u / 4, u % 4);
    places_[0] = keys + place, places_[1] = keys + place_of_next_step(place);
    whole_places_[0] = keys + whole_place, whole_places_[1] = keys + place_of_next_two(whole_place, 1);
  }

  __device__ void run() {
    find_first();
    begin_part(0);
#pragma unroll
    for (int step = 0; step < kAhead; ++step) load(step);
    for (int n = 0;; ++n) {
      const int slot = n % Shared::kParts;
      const Part part = s_.parts[slot];
      const bool has_both = of_warp(part.count) > kPart / 2, is_end = of_warp(part.is_end);
      if (of_warp(part.is_first) && n > 0) {
        s_.queries_free.wait(queries_parity_);
        queries_parity_ ^= 1;
        copy_queries(part.item);
      }
      bool has_great_scale = false;
      if constexpr (Step::kHasFp8) {
        s_.have_scales[slot].wait(n / Shared::kParts & 1);
        has_great_scale = of_warp(s_.has_great_scale[slot]);
      }
      uint32_t seen = 0;
      int index = 0;
      const uint8_t* key = nullptr;
      uint2 scales{};
#pragma unroll
      for (int step = 0; step < Step::kCount; ++step) {
        const int block = Step::block(step);
        // All before any store, which may change them for all the compiler knows.
        uint16_t factors[kPieces] = {};
        if constexpr (Step::kHasFp8) {
#pragma unroll
          for (int i = 0; i < kPieces; ++i) {
            if (Step::is_fp8(step)) factors[i] = s_.scales[slot][first_key() + 32 * i][step];
          }
        }
        if (Step::is_first(step)) s_.free[block].wait((n & 1) ^ 1);
        store(step, factors, has_both, seen);
        if (Step::is_fp8(step) && has_great_scale) scale_again(step, slot, has_both);
        if (Step::is_last(step)) {
          if (block == 0) ptx::wait_for_copies<0>();
          ptx::show_to_products();
          arrive(block);
        }
        if (step + kAhead < Step::kCount) {
          load(step + kAhead);
        } else if (!is_end) {
          if (step + kAhead == Step::kCount) begin_part(n + 1);
          load(step + kAhead - Step::kCount);
        }
        // The next part's keys are found meanwhile: what a load brings is used steps later.
        if (!is_end && finds(n + 1)) {
          if (step == 0) {
#pragma unroll 1
            for (int part = max(0, n - 1); part <= n; ++part) ahead_.advance();
            index = ahead_.index_of(static_cast<int>(thread_ % kPart));
          } else if (step == 2) {
            key = ahead_.address_of(index);
          } else if (step == 4) {
            scales = publish(n + 1, key);
          } else if (step == 6) {
            publish_scales(n + 1, scales);
          }
        }
      }
      if (is_end) break;
    }
  }

 private:
  using Step = Steps<kFormat>;
  using Bytes = EntryBytes<kFormat>;
  static constexpr int kAhead = Step::kAhead;
  // A lane has 8 bytes of every 32nd key, from this one on. A half warp has keys 0 and 3 of four, or 1 and 2: what it
  // stores at once lies in different banks.
  static constexpr int kPieces = kPart / 32;
  __device__ unsigned first_key() const {
    return thread_ / kWarp * 4 + thread_ / 8 % 4 * 3 % 4;
  }
  // The warpgroups find parts in turn, a key each thread: what one then is behind, it makes up for in the next part.
  __device__ bool finds(int n) const {
    return of_warp(static_cast<int>(thread_ / kPart)) == n % 2;
  }
  // What all of a warp's lanes have, as one value for the compiler: it would have to prepare for lanes that part.
  __device__ static int of_warp(int value) {
    return __shfl_sync(~0u, value, 0);
  }
  // What the warp's lanes have written of a block is there.
  __device__ void arrive(int block) {
    if (arrivals_of(block) == kProducers) return s_.full[block].arrive();
    __syncwarp();
    if (lane_ == 0) s_.full[block].arrive();
  }

  // Queries wait for nothing: they are on their way while keys are sought.
  __device__ void find_first() {
    const int index = finds(0) ? ahead_.index_of(static_cast<int>(thread_)) : 0;
    copy_queries(first_item());
    if (finds(0)) publish_scales(0, publish(0, ahead_.address_of(index)));
  }
  // Loads its scales too.
  __device__ uint2 publish(int n, const uint8_t* key) {
    const int slot = n % Shared::kParts;
    s_.addresses[slot][thread_ % kPart] = key;
    if (thread_ % kPart == 0) {
      s_.parts[slot] = ahead_.part();
      // Part n - 2's, for n + 2. All warps are done with that part: some of its blocks have been freed.
      s_.has_great_scale[(n + 2) % Shared::kParts] = false;
    }
    s_.found[slot].arrive();
    if (n > 0 && ahead_.is_near()) ptx::prefetch_range(key, Bytes::kCount);
    if constexpr (!Step::kHasFp8) return {};
    return ptx::load_here(reinterpret_cast<const uint2*>(key + Bytes::kAt.scales));
  }
  __device__ void publish_scales(int n, const uint2& codes) {
    if constexpr (!Step::kHasFp8) return;
    const int slot = n % Shared::kParts;
    uint16_t* to = s_.scales[slot][thread_ % kPart];
    if (((codes.x | (codes.y & 0xFFFFFF)) & 0x80808080) == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t pair = __byte_perm(i < 2 ? codes.x : codes.y, 0, i % 2 == 0 ? 0x4140 : 0x4342);
        reinterpret_cast<uint32_t*>(to)[i] = (pair + 120 * 0x10001) << 7;
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kBlocks - 1; ++i) {
        const uint32_t code = (i < 4 ? codes.x : codes.y) >> i % 4 * 8 & 0xFF;
        const cuda_common::PairScale scale = cuda_common::pair_scale(code, code);
        to[i] = static_cast<uint16_t>(scale.first);
        if (scale.second != cuda_common::kOnePair) s_.has_great_scale[slot] = true;
      }
    }
    s_.have_scales[slot].arrive();
  }
  // Finds this lane's bytes of part n.
  __device__ void begin_part(int n) {
    const int slot = n % Shared::kParts;
    s_.found[slot].wait(n / Shared::kParts & 1);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) keys_[i] = s_.addresses[slot][first_key() + 32 * i] + thread_ % 8 * 8;
  }

  // This lane's pieces of a step. Behind a part's last key it is there again.
  __device__ void load(int step) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint2 words = ptx::load_here(reinterpret_cast<const uint2*>(keys_[i] + step * kGroup));
      pieces_[step % kAhead][i][0] = words.x, pieces_[step % kAhead][i][1] = words.y;
    }
  }

  // Keys are multiplied 64 at a time: has_both, or the second are left as they are.
  __device__ void store(int step, const uint16_t (&factors)[kPieces], bool has_both, uint32_t& seen) {
    store_half(step, factors, 0, seen);
    if (has_both) store_half(step, factors, kPieces / 2, seen);
  }
  __device__ void store_half(int step, const uint16_t (&factors)[kPieces], int first, uint32_t& seen) {
#pragma unroll
    for (int i = first; i < first + kPieces / 2; ++i) {
      Piece& piece = pieces_[step % kAhead][i];
      if (!Step::is_fp8(step)) {
        // A NaN's code was stored as a number. One NaN in a key is enough: its logits are NaN, all probabilities and
        // outputs with them. (Of the lane's keys the first is there if any is.)
        if (Step::kHasFp8 && step + 1 == Step::kCount && i == 0 && (seen & cuda_common::kSeenNan) != 0)
          piece[0] = cuda_common::kNanPair;
        put(step, whole_places_[Step::half(step)], i, piece[0], piece[1]);
        continue;
      }
      uint32_t pairs[4];
      cuda_common::usual_fp8_pairs(piece, factors[i], pairs);
      put(step, places_[0], i, pairs[0], pairs[1]);
      put(step, places_[1], i, pairs[2], pairs[3]);
      seen = cuda_common::seen_e4m3(cuda_common::seen_e4m3(seen, piece[0]), piece[1]);
    }
  }
  // Of the lane's key i, from its place in the first block for the first.
  __device__ static uint2* at(int step, char* place, int i) {
    constexpr int kBlockBytes = static_cast<int>(sizeof Shared::keys[0]);
    return reinterpret_cast<uint2*>(place + Step::block(step) * kBlockBytes + 32 * i * kRowBytes);
  }
  __device__ static void put(int step, char* place, int i, uint32_t first, uint32_t second) {
    *at(step, place, i) = {first, second};
  }
  // What one factor can't hold of a scale: a rare second multiplication of what this lane has stored.
  __device__ void scale_again(int step, int slot, bool has_both) {
#pragma unroll 1
    for (int i = 0; i < (has_both ? kPieces : kPieces / 2); ++i) {
      const uint32_t code = __ldg(s_.addresses[slot][first_key() + 32 * i] + Bytes::kAt.scales + step);
      const uint32_t second = cuda_common::pair_scale(code, code).second;
#pragma unroll
      for (char* place : places_) {
        const uint2 pairs = *at(step, place, i);
        put(step, place, i, ptx::multiply_bf16x2(pairs.x, second), ptx::multiply_bf16x2(pairs.y, second));
      }
    }
  }

  // A lane copies channels 16 t + 4 k + [0, 4) of each block of 64. Heads that aren't there are the last one again.
  __device__ void copy_queries(int item) {
    const unsigned piece = thread_ % 16;
    for (unsigned row = thread_ / 16; row < kHeads; row += kProducers / 16) {
      const int head = min(first_head_of(job_, item) + static_cast<int>(row), job_.heads - 1);
      const uint16_t* from = job_.q + (token_of(job_, item) * job_.heads + head) * kWidth + 4 * piece;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        ptx::copy_async<8>(s_.queries[b] + place_of(row, piece / 4, piece % 4), from + b * kGroup);
      }
    }
    ptx::commit_copies();
  }

  const Job& job_;
  Shared& s_;
  Walk<kFormat> ahead_;  // at the part whose keys this thread last sought
  const uint8_t* keys_[kPieces];
  Piece pieces_[kAhead][kPieces] = {};
  const unsigned thread_, lane_;
  char *places_[2], *whole_places_[2];  // of FP8, two steps of a product; of BF16, both halves of a block
  int queries_parity_ = 0;
};

}  // namespace tessera::backends::sm90::attention_wide
