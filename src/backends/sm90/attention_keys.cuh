// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a thread block of attention.cu keeps in shared memory, and the warpgroup that fills it: keys in BF16 in blocks
// of 64 channels, part after part, and queries.
#include <cstdint>

#include "backends/cuda_common/attention_parts.cuh"
#include "backends/cuda_common/key_pairs.cuh"
#include "backends/cuda_common/ptx/bulk_copy.cuh"
#include "backends/cuda_common/ptx/cp_async.cuh"
#include "backends/cuda_common/ptx/prefetch.cuh"
#include "backends/cuda_common/ptx/wgmma.cuh"

namespace tessera::backends::sm90::attention_wide {

namespace ptx = cuda_common::ptx;
using Job = cuda_common::AttentionJob;
using Keys = cuda_common::AttentionKeys;

constexpr int kHeads = 64, kWidth = 512, kPart = static_cast<int>(ops::kAttentionPart);
constexpr int kGroup = static_cast<int>(ops::kKvGroup), kBlocks = kWidth / kGroup;
constexpr int kWarp = 32, kWarpgroup = 128, kConsumers = 2 * kWarpgroup, kProducers = 2 * kWarpgroup;
constexpr int kThreads = kConsumers + kProducers;
constexpr int kConsumerRegisters = 192, kProducerRegisters = 64;
// What a launch gives a block of 512 threads is all that its warpgroups can deal out among them.
static_assert(2 * kConsumerRegisters + 2 * kProducerRegisters <= 4 * 128);
constexpr int kRowBytes = 2 * kGroup, kEightRows = 8 * kRowBytes;
static_assert(kPart == 2 * 64 && kBlocks % 2 == 0);

// Few tokens: up to so many clusters of attention_few.cu, of a token's part and 16 heads, have that; up to so many
// thread blocks of the portable kernel, which all find place at once, have that; up to so many pairs of a token and 64
// heads are spread (beyond, storing and merging parts costs more than it gains); the parts that the workspace holds for
// them (seven to each of 44 tokens of Flash, fourteen to each of 22 of Pro).
constexpr int kFewClusters = 48, kFewTokens = 8, kFewBlocks = 132, kMostSpread = 44, kSlots = 320;

// A part as consumers need to know it. First and last: of those that this thread block has of a token.
struct Part {
  int32_t index, count;
  bool is_first, is_last;
};

struct Shared {
  char queries[kBlocks][kHeads * kRowBytes];
  char keys[kBlocks][kPart * kRowBytes];
  char probabilities[kPart / kGroup][kHeads * kRowBytes];  // of 64 keys each
  // Of the parts that are worked on, and of the next.
  static constexpr int kParts = 4;
  const uint8_t* addresses[kParts][kPart];
  uint8_t scales[kParts][kPart][8];  // UE8M0, a block's each
  Part parts[kParts];
  float max[2][kHeads], sum[2][kHeads];  // by consumers
  ptx::SharedBarrier full[kBlocks], free[kBlocks], found[kParts], have_scales[kParts], queries_free, have_max,
      have_probabilities;
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

// The order in which producers bring a part: a step is 64 bytes of each key. kAhead: steps that are on their way.
template <ops::EntryFormat kFormat>
struct Steps {
  static constexpr bool kHasFp8 = kFormat == ops::EntryFormat::kKvFp8Bf16;
  static constexpr int kCount = kHasFp8 ? kBlocks + 1 : 2 * kBlocks, kAhead = kHasFp8 ? 3 : 4;
  static_assert(kCount % kAhead == 0);
  __device__ static bool is_fp8(int step) { return kHasFp8 && step < kBlocks - 1; }
  __device__ static int block(int step) { return kHasFp8 ? min(step, kBlocks - 1) : step / 2; }
  __device__ static int half(int step) { return kHasFp8 ? step / kBlocks : step % 2; }
  __device__ static bool is_first(int step) { return half(step) == 0; }
  __device__ static bool is_last(int step) { return is_fp8(step) || half(step) == 1; }
};

template <ops::EntryFormat kFormat>
class Producer {
 public:
  __device__ Producer(const Job& job, Shared& s) : job_(job), s_(s), ahead_(job), thread_(threadIdx.x - kConsumers) {}

  __device__ void run() {
    find_first();
#pragma unroll
    for (int step = 0; step < kAhead; ++step) load(step, 0, step);
    for (int n = 0;; ++n) {
      const Part part = s_.parts[n % Shared::kParts];
      if (part.is_first && n > 0) {
        s_.queries_free.wait(queries_parity_);
        queries_parity_ ^= 1;
        copy_queries(ahead_.item());
      }
      const bool has_next = ahead_.advance();
      if constexpr (Step::kHasFp8) s_.have_scales[n % Shared::kParts].wait(n / Shared::kParts & 1);
      int index = 0;
#pragma unroll 1
      for (int first = 0; first < Step::kCount; first += kAhead) {
        const bool is_end = first + kAhead == Step::kCount;
        // The next part's keys are found meanwhile: what a load brings is used steps later.
        if (has_next && is_end) begin_part(n + 1);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int step = first + i, block = Step::block(step);
          if (Step::is_first(step)) s_.free[block].wait((n & 1) ^ 1);
          store(i, n, part.count, step);
          if (Step::is_last(step)) {
            if (block == 0) ptx::wait_for_copies<0>();
            ptx::show_to_products();
            s_.full[block].arrive();
          }
          if (!is_end || has_next) load(i, is_end ? n + 1 : n, is_end ? i : step + kAhead);
        }
        if (has_next && finds_keys()) {
          if (first == 0) index = ahead_.index_of(static_cast<int>(thread_));
          if (first == kAhead) publish(n + 1, ahead_.address_of(index));
        }
      }
      if (!has_next) break;
    }
  }

 private:
  using Step = Steps<kFormat>;
  static constexpr int kAhead = Step::kAhead;
  // A lane has 8 bytes of every 32nd key, from this one on. A half warp has keys 0 and 3 of four, or 1 and 2: what it
  // stores at once lies in different banks.
  static constexpr int kPieces = kPart / 32;
  __device__ unsigned first_key() const {
    return thread_ / kWarp * 4 + thread_ / 8 % 4 * 3 % 4;
  }
  // Each of the first warpgroup finds a key.
  __device__ bool finds_keys() const {
    return thread_ < kPart;
  }

  // Queries wait for nothing: they are on their way while keys are sought.
  __device__ void find_first() {
    const int index = finds_keys() ? ahead_.index_of(static_cast<int>(thread_)) : 0;
    copy_queries(ahead_.item());
    if (finds_keys()) publish(0, ahead_.address_of(index));
    begin_part(0);
  }
  __device__ void publish(int n, const uint8_t* key) {
    s_.addresses[n % Shared::kParts][thread_] = key;
    if (thread_ == 0) s_.parts[n % Shared::kParts] = ahead_.part();
    s_.found[n % Shared::kParts].arrive();
    if constexpr (Step::kHasFp8) {
      if (key != nullptr) {
        *reinterpret_cast<uint2*>(s_.scales[n % Shared::kParts][thread_]) =
            __ldg(reinterpret_cast<const uint2*>(key + job_.entries.at.scales));
      }
      s_.have_scales[n % Shared::kParts].arrive();
    }
    if (n == 0 || key == nullptr) return;
    for (int64_t at = 0; at < job_.entries.bytes; at += kLine) ptx::prefetch(key + at);
    ptx::prefetch(key + job_.entries.bytes - 1);
  }
  __device__ void begin_part(int n) {
    s_.found[n % Shared::kParts].wait(n / Shared::kParts & 1);
  }

  // Keys are multiplied 64 at a time: others are not brought. Behind the last one it is there again, times 0.
  __device__ bool is_needed(int i, int count) const {
    return 32 * i < (count + 63) / 64 * 64;
  }

  // This lane's pieces of a step of part n.
  __device__ void load(int slot, int n, int step) {
    const int count = s_.parts[n % Shared::kParts].count;
    const bool is_fp8 = Step::is_fp8(step);
    const int64_t at = is_fp8 || !Step::kHasFp8 ? step * kGroup : job_.entries.at.rope + Step::half(step) * kGroup;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (!is_needed(i, count)) break;
      const uint8_t* key = s_.addresses[n % Shared::kParts][first_key() + 32 * i];
      const uint2 words = __ldg(reinterpret_cast<const uint2*>(key + at) + thread_ % 8);
      pieces_[slot][i][0] = words.x, pieces_[slot][i][1] = words.y;
    }
  }

  __device__ void store(int slot, int n, int count, int step) {
    const int block = Step::block(step) * static_cast<int>(sizeof s_.keys[0]);
    const unsigned u = thread_ % 8;
    const bool is_fp8 = Step::is_fp8(step);
    const int place = block + (is_fp8 ? place_of(first_key(), u / 2, u % 2 * 2)
                                      : place_of_next_two(place_of(first_key(), u / 4, u % 4), Step::half(step)));
    const auto put = [&](int at, int i, uint32_t first, uint32_t second) {
      *reinterpret_cast<uint2*>(&s_.keys[0][0] + at + 32 * i * kRowBytes) = {first, second};
    };
    if (!is_fp8) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if (is_needed(i, count)) put(place, i, pieces_[slot][i][0], pieces_[slot][i][1]);
      }
      return;
    }
    uint32_t scales[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) scales[i] = s_.scales[n % Shared::kParts][first_key() + 32 * i][step];
    const auto convert = [&](const auto& make_pairs) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if (!is_needed(i, count)) break;
        uint32_t pairs[4];
        make_pairs(pieces_[slot][i], scales[i], pairs);
        put(place, i, pairs[0], pairs[1]);
        put(place_of_next_step(place), i, pairs[2], pairs[3]);
      }
    };
    // One branch for all pieces: what they take one after another is latencies.
    bool are_usual = true;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      are_usual = cuda_common::are_usual_fp8(pieces_[slot][i], scales[i]) && are_usual;
    }
    if (are_usual) {
      convert(
          [](const Piece& piece, uint32_t scale, auto& pairs) { cuda_common::usual_fp8_pairs(piece, scale, pairs); });
    } else {
      convert([](const Piece& piece, uint32_t scale, auto& pairs) { cuda_common::fp8_pairs(piece, scale, pairs); });
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

  static constexpr int kLine = 128;  // of the L2 cache

  const Job& job_;
  Shared& s_;
  Walk ahead_;  // the part whose keys are sought
  Piece pieces_[kAhead][kPieces] = {};
  const unsigned thread_;
  int queries_parity_ = 0;
};

}  // namespace tessera::backends::sm90::attention_wide
