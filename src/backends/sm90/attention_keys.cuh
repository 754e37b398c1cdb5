// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a thread block of attention.cu keeps in shared memory, and the warpgroup that fills it: keys in BF16 in blocks
// of 64 channels, part after part, and queries.
#include <cstdint>

#include "backends/cuda_common/attention_parts.cuh"
#include "backends/cuda_common/key_pairs.cuh"
#include "backends/cuda_common/ptx/bulk_copy.cuh"
#include "backends/cuda_common/ptx/cp_async.cuh"
#include "backends/cuda_common/ptx/wgmma.cuh"

namespace tessera::backends::sm90::attention_wide {

namespace ptx = cuda_common::ptx;
using Job = cuda_common::AttentionJob;
using Keys = cuda_common::AttentionKeys;

constexpr int kHeads = 64, kWidth = 512, kPart = static_cast<int>(ops::kAttentionPart);
constexpr int kGroup = static_cast<int>(ops::kKvGroup), kBlocks = kWidth / kGroup;
constexpr int kWarp = 32, kWarpgroup = 128, kConsumers = 2 * kWarpgroup, kProducers = kWarpgroup;
constexpr int kThreads = kConsumers + kProducers;
constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;
// What a launch gives a block of 384 threads is all that its warpgroups can deal out among them.
static_assert(2 * kConsumerRegisters + kProducerRegisters <= 3 * 168);
constexpr int kRowBytes = 2 * kGroup, kEightRows = 8 * kRowBytes;
constexpr int kSteps = kPart / 16;  // of the product with the values
static_assert(kPart == 2 * 64 && kBlocks % 2 == 0);

// Few tokens: so many have the portable kernel; up to so many pairs of a token and 64 heads are spread; the parts that
// the workspace holds for them (five to each of 64 tokens of Flash, nine to each of 32 of Pro).
constexpr int kFewTokens = 8, kMostSpread = 64, kSlots = 320;

// A part as consumers need to know it. First and last: of those that this thread block has of a token.
struct Part {
  int32_t index, count;
  bool is_first, is_last;
};

struct Shared {
  char queries[kBlocks][kHeads * kRowBytes];
  char keys[kBlocks][kPart * kRowBytes];
  uint4 probabilities[kSteps][kWarpgroup];  // as a lane's A operand
  // Of the parts that are worked on, and of the next.
  static constexpr int kParts = 4;
  const uint8_t* addresses[kParts][kPart];
  Part parts[kParts];
  float max[2][kHeads], sum[2][kHeads];  // by consumers
  ptx::SharedBarrier full[kBlocks], free[kBlocks], found[kParts], queries_free, have_max, have_probabilities;
};

static_assert(sizeof(Shared) <= (227 << 10));

// Pairs of a token and 64 heads; each thread block takes every gridDim.x-th.
__device__ inline int head_groups(const Job& job) {
  return (job.heads + kHeads - 1) / kHeads;
}
__device__ inline int num_items(const Job& job) {
  return static_cast<int>(job.num_tokens) * head_groups(job);
}
__device__ inline int64_t token_of(const Job& job, int item) {
  return item / head_groups(job);
}
__device__ inline int first_head_of(const Job& job, int item) {
  return item % head_groups(job) * kHeads;
}
__device__ inline int first_item() {
  return static_cast<int>(blockIdx.x);
}
// Whether the token's parts are spread over gridDim.z thread blocks.
__device__ inline bool is_spread(const Job& job, int num_parts) {
  return num_parts <= job.slots;
}

// The parts of a thread block, in order. What it can work out anew it does not hold: registers are short.
class Walk {
 public:
  __device__ explicit Walk(const Job& job) : job_(job), item_(first_item()), part_(static_cast<int>(blockIdx.z)) {}
  // The next part; false: there is none.
  __device__ bool advance() {
    const int num_parts = keys().num_parts;
    part_ += stride(num_parts);
    if (part_ < num_parts) return true;
    item_ += static_cast<int>(gridDim.x);
    part_ = 0;
    return item_ < num_items(job_);
  }
  __device__ int item() const { return item_; }
  __device__ Part part() const {
    const Keys k = keys();
    const int step = stride(k.num_parts);
    return {part_, k.num_parts == 0 ? 0 : k.count_of(part_), part_ < step, part_ + step >= k.num_parts};
  }
  // Of key n, or the last where it isn't there.
  __device__ int index_of(int n) const {
    const Keys k = keys();
    return k.num_parts == 0 ? 0 : k.index_of(job_, token_of(job_, item_), part_, min(n, k.count_of(part_) - 1));
  }
  __device__ const uint8_t* address_of(int index) const {
    const Keys k = keys();
    return k.num_parts == 0 ? nullptr : k.key_at(job_, token_of(job_, item_), part_, index);
  }

 private:
  __device__ Keys keys() const { return Keys::of_token(job_, token_of(job_, item_)); }
  // A token's parts are dealt out over gridDim.z thread blocks where they are spread; where not, one has them all.
  __device__ int stride(int num_parts) const { return is_spread(job_, num_parts) ? static_cast<int>(gridDim.z) : 1; }

  const Job& job_;
  int item_, part_;
};

// Where channels [16 t, + 2) of a row lie in a block, and from that where [16 t + 2 j, + 2) do.
__device__ inline int place_of(int row, int t) {
  return row * kRowBytes + row % 8 * 16 + 4 * t;
}
__device__ inline int place_of_pair(int place, int j) {
  return place ^ j * 16;
}

// Sixteen bytes of a lane's 16 channels of a key: all of them in FP8, half of them in BF16.
struct Piece {
  uint32_t words[4];
  uint32_t scale;  // UE8M0

  __device__ void load(const uint8_t* at) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 two = __ldg(reinterpret_cast<const uint2*>(at) + i);
      words[2 * i] = two.x, words[2 * i + 1] = two.y;
    }
  }
};

// The order in which producers bring a part: a step is a Piece of each 16 channels of a block's keys.
template <ops::EntryFormat kFormat>
struct Steps {
  static constexpr bool kHasFp8 = kFormat == ops::EntryFormat::kKvFp8Bf16;
  static constexpr int kCount = kHasFp8 ? kBlocks + 1 : 2 * kBlocks;
  __device__ static bool is_fp8(int step) { return kHasFp8 && step < kBlocks - 1; }
  __device__ static int block(int step) { return kHasFp8 ? min(step, kBlocks - 1) : step / 2; }
  __device__ static int half(int step) { return kHasFp8 ? step / kBlocks : step % 2; }
  __device__ static bool is_first(int step) { return half(step) == 0; }
  __device__ static bool is_last(int step) { return is_fp8(step) || half(step) == 1; }
};

template <ops::EntryFormat kFormat>
class Producer {
 public:
  __device__ Producer(const Job& job, Shared& s)
      : job_(job), s_(s), ahead_(job), thread_(static_cast<int>(threadIdx.x) - kConsumers) {}

  __device__ void run() {
    using Step = Steps<kFormat>;
    publish(0, ahead_.address_of(ahead_.index_of(thread_)));
    begin_part(0);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) load(i, 0, 0);
    int queries_parity = 1;
    for (int n = 0;; ++n) {
      const int count = s_.parts[n % Shared::kParts].count;
      if (s_.parts[n % Shared::kParts].is_first) {
        s_.queries_free.wait(queries_parity);
        queries_parity ^= 1;
        copy_queries(ahead_.item());
      }
      const bool has_next = ahead_.advance();
      int index = 0;
      const uint8_t* address = nullptr;
#pragma unroll 1
      for (int step = 0; step < Step::kCount; ++step) {
        const int block = Step::block(step);
        const bool is_end = step + 1 == Step::kCount;
        if (is_end && has_next) begin_part(n + 1);
        if (Step::is_first(step)) s_.free[block].wait((n & 1) ^ 1);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          store(i, count, step);
          if (!is_end || has_next) load(i, is_end ? n + 1 : n, is_end ? 0 : step + 1);
        }
        if (Step::is_last(step)) {
          if (block == 0) ptx::wait_for_copies<0>();
          ptx::show_to_products();
          s_.full[block].arrive();
        }
        // The next part's keys are found meanwhile: what these loads bring is used steps later.
        if (has_next && step == 1) index = ahead_.index_of(thread_);
        if (has_next && step == 3) address = ahead_.address_of(index);
        if (has_next && step == 5) publish(n + 1, address);
      }
      if (!has_next) break;
    }
  }

 private:
  // A lane has 16 channels (t = lane % 4) of every 32nd key, from this one on.
  static constexpr int kPieces = kPart / 32;
  __device__ int first_key() const {
    return thread_ / 4;
  }

  __device__ void publish(int n, const uint8_t* address) {
    s_.addresses[n % Shared::kParts][thread_] = address;
    if (thread_ == 0) s_.parts[n % Shared::kParts] = ahead_.part();
    s_.found[n % Shared::kParts].arrive();
  }
  __device__ void begin_part(int n) {
    s_.found[n % Shared::kParts].wait(n / Shared::kParts & 1);
  }

  // Keys are multiplied 64 at a time: others are not brought. Behind the last one it is there again, times 0.
  __device__ bool is_needed(int i, int count) const {
    return 32 * i < (count + 63) / 64 * 64;
  }

  // Piece i of a step of part n.
  __device__ void load(int i, int n, int step) {
    if (!is_needed(i, s_.parts[n % Shared::kParts].count)) return;
    const uint8_t* key = s_.addresses[n % Shared::kParts][first_key() + 32 * i];
    const int t = thread_ % 4;
    if (Steps<kFormat>::is_fp8(step)) {
      pieces_[i].load(key + step * kGroup + 16 * t);
      pieces_[i].scale = __ldg(key + job_.entries.at.scales + step);
    } else {
      const uint8_t* values =
          Steps<kFormat>::kHasFp8 ? key + job_.entries.at.rope : key + Steps<kFormat>::block(step) * kRowBytes;
      pieces_[i].load(values + 32 * t + 16 * Steps<kFormat>::half(step));
    }
  }

  __device__ void store(int i, int count, int step) {
    if (!is_needed(i, count)) return;
    const int block = Steps<kFormat>::block(step) * static_cast<int>(sizeof s_.keys[0]);
    const int place = block + place_of(first_key() + 32 * i, thread_ % 4);
    const auto put = [&](int j, uint32_t pair) {
      *reinterpret_cast<uint32_t*>(&s_.keys[0][0] + place_of_pair(place, j)) = pair;
    };
    if (Steps<kFormat>::is_fp8(step)) {
      uint32_t pairs[8];
      cuda_common::fp8_pairs(pieces_[i].words, pieces_[i].scale, pairs);
#pragma unroll
      for (int j = 0; j < 8; ++j) put(j, pairs[j]);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) put(4 * Steps<kFormat>::half(step) + j, pieces_[i].words[j]);
    }
  }

  // A lane copies channels [2 lane, + 2) of each block of 64. Heads that aren't there are the last one again.
  __device__ void copy_queries(int item) {
    const int lane = thread_ % kWarp;
    for (int row = thread_ / kWarp; row < kHeads; row += kProducers / kWarp) {
      const int head = min(first_head_of(job_, item) + row, job_.heads - 1);
      const int place = place_of_pair(place_of(row, lane / 8), lane % 8);
      const uint16_t* from = job_.q + (token_of(job_, item) * job_.heads + head) * kWidth + 2 * lane;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        ptx::copy_async<4>(s_.queries[b] + place, from + b * kGroup);
      }
    }
    ptx::commit_copies();
  }

  const Job& job_;
  Shared& s_;
  Walk ahead_;  // the part whose keys are sought
  Piece pieces_[kPieces];
  const int thread_;
};

}  // namespace tessera::backends::sm90::attention_wide
