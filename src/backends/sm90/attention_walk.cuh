// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a thread block of attention.cu works on: pairs of a token and 64 heads, of each the parts of 128 keys in order.
#include <cstdint>

#include "backends/cuda_common/attention_parts.cuh"

namespace tessera::backends::sm90::attention_wide {

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

// A part. First and last: of those that this thread block has of a token; the end: of all that it has.
struct Part {
  int32_t index, count, item;
  bool is_first, is_last, is_end;
};

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

// Step after step of 64 bytes goes through codes and rotary part.
template <ops::EntryFormat kFormat>
using EntryBytes = cuda_common::EntryBytes<kFormat, kWidth>;

// The parts of a thread block, in order. What takes a load or a division is held, the rest is worked out anew.
template <ops::EntryFormat kFormat>
class Walk {
 public:
  __device__ explicit Walk(const Job& job) : job_(job), item_(first_item()), part_(static_cast<int>(blockIdx.z)) {
    find_token();
  }
  // To the next part, which there is.
  __device__ void advance() {
    const int num_parts = keys().num_parts;
    part_ += stride(num_parts);
    if (part_ < num_parts) return;
    item_ += static_cast<int>(gridDim.x);
    part_ = 0;
    find_token();
  }
  __device__ Part part() const {
    const Keys k = keys();
    const int step = stride(k.num_parts);
    const bool is_last = part_ + step >= k.num_parts;
    return {part_,   k.num_parts == 0 ? 0 : k.count_of(part_),
            item_,   part_ < step,
            is_last, is_last && item_ + static_cast<int>(gridDim.x) >= num_items(job_)};
  }
  // Of key n, or the last where it isn't there.
  __device__ int index_of(int n) const {
    const Keys k = keys();
    return k.num_parts == 0 ? 0 : k.index_of(job_, token_, part_, min(n, k.count_of(part_) - 1));
  }
  // Where there are no keys, bytes of the queries, which nobody uses.
  __device__ const uint8_t* address_of(int index) const {
    const Keys k = keys();
    if (k.num_parts == 0) return reinterpret_cast<const uint8_t*>(job_.q);
    constexpr int64_t kBytes = EntryBytes<kFormat>::kCount;
    return k.is_window(part_) ? job_.window_cache.of_row(token_) + index * kBytes
                              : job_.entry_cache.of_row(token_).at(index, kBytes);
  }
  // Whether the part's keys are in this GPU's memory, all of them.
  __device__ bool is_near() const { return !job_.entry_cache.has_far || keys().is_window(part_); }

 private:
  __device__ void find_token() {
    token_ = static_cast<int>(token_of(job_, item_));
    position_ = static_cast<int>(job_.positions[token_]);
    num_entries_ = job_.entry_cache.exists() ? job_.num_entries[token_] : 0;
  }
  __device__ Keys keys() const { return Keys::of(job_, position_, num_entries_); }
  // A token's parts are dealt out over gridDim.z thread blocks where they are spread; where not, one has them all.
  __device__ int stride(int num_parts) const { return is_spread(job_, num_parts) ? static_cast<int>(gridDim.z) : 1; }

  const Job& job_;
  int item_, part_, token_, position_, num_entries_;
};

}  // namespace tessera::backends::sm90::attention_wide
