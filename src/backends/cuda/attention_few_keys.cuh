// SPDX-License-Identifier: Apache-2.0
#pragma once
// What attention_few.cuh's thread blocks keep in shared memory, a token's keys, and their logits. What bounds both
// halves is how many instructions a warp issues, one warp to a scheduler in a cluster: so where channels lie is known
// to the compiler there, what is rare (a great scale, a NaN) is found once for a row, and loads are on their way before
// what they wait for is worked out.
#include "backends/cuda_common/attention_parts.cuh"
#include "backends/cuda_common/key_pairs.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/ptx/cluster.cuh"

namespace tessera::backends::cuda::attention_few {

using namespace cuda_common;

constexpr int kHeads = 16, kWarps = 16;
constexpr int kPart = static_cast<int>(ops::kAttentionPart), kGroup = static_cast<int>(ops::kKvGroup);
constexpr int kMaxWidth = static_cast<int>(ops::kMaxHeadDim);
constexpr int kWarpKeys = 8, kWarpChannels = 32;
static_assert(kPart == kWarpKeys * kWarps && kMaxWidth == kWarpChannels * kWarps);

using Job = AttentionJob;
using Keys = AttentionKeys;

// Its warps; kBlocks: thread blocks, which are a cluster if they are several. All are in dynamic shared memory.
template <int kBlocks>
struct Place {
  static constexpr int kOwnWarps = kWarps / kBlocks, kThreads = 32 * kOwnWarps;
  static_assert(kThreads >= kPart && kWarps % kBlocks == 0);
  // Of all 16.
  __device__ static int warp() {
    const int own = static_cast<int>(threadIdx.x) / 32;
    if constexpr (kBlocks == 1) return own;
    return ptx::cluster_rank() * kOwnWarps + own;
  }
  // By all of them; what was written to shared memory before is seen behind it.
  __device__ static void meet() {
    if constexpr (kBlocks == 1) {
      __syncthreads();
    } else {
      ptx::sync_cluster();
    }
  }
};

// Where a key's channels are: constants where blocks are a cluster, whose keys are DeepSeek-V4's (attention_supports of
// sm90), so that instructions hold them.
template <ops::EntryFormat kFormat, int kBlocks>
struct KeyLayout {
  using Known = EntryBytes<kFormat, kMaxWidth>;
  static constexpr bool kHasFp8 = Known::kHasFp8, kIsKnown = kBlocks > 1;
  const Job& job;

  __device__ int width() const { return kIsKnown ? kMaxWidth : job.width; }
  // Groups of channels in FP8, which come first.
  __device__ int fp8_groups() const {
    if constexpr (!kHasFp8) return 0;
    return kIsKnown ? kMaxWidth / kGroup - 1 : static_cast<int>(job.entries.nope) / kGroup;
  }
  __device__ int bytes() const { return static_cast<int>(kIsKnown ? Known::kCount : job.entries.bytes); }
  __device__ const uint8_t* scales(const uint8_t* key) const {
    return key + (kIsKnown ? Known::kAt.scales : job.entries.at.scales);
  }
  // From that channel of a group on.
  template <bool kIsFp8, int kChannels>
  __device__ void load(const uint8_t* key, int group, int channel, KeyPiece<kChannels>& piece) const {
    if constexpr (kIsFp8) {
      piece.load_fp8(key + group * kGroup + channel);
    } else {
      const int64_t begin = !kHasFp8 ? 0 : kIsKnown ? Known::kAt.rope : job.entries.at.rope;
      piece.load_bf16(key + begin + 2 * ((group - fp8_groups()) * kGroup + channel));
    }
  }
  template <int kChannels>
  __device__ void load(const uint8_t* key, int group, int channel, KeyPiece<kChannels>& piece) const {
    if (group < fp8_groups()) {
      load<true>(key, group, channel, piece);
    } else {
      load<false>(key, group, channel, piece);
    }
  }
};

struct alignas(16) KeyPair {
  const uint8_t* at[2];
};

struct Shared {
  // Rows are padded so that the lanes of a warp meet different banks.
  uint16_t q[kHeads][kMaxWidth + 8];
  float logits[kHeads][kPart + 4];
  uint16_t probabilities[kHeads][kPart + 8];
  KeyPair keys[kPart / 2];                        // behind a part's last key it is there again
  uint16_t scales[kMaxWidth / kGroup][kPart];     // codes of the groups that this block's warps have values of
  alignas(4) bool has_unusual_scale[kPart / 32];  // by the warps that find keys
  float max[kHeads], sum[kHeads];
};

// Where a token's keys lie. Positions, numbers, places and rings are a step's inputs, which no kernel makes, and so is
// where keys of the window lie. What entries are attended a kernel may choose, and one may make the table of their
// pages (comm/near_pages.h).
struct TokenKeys {
  Keys keys;
  const uint8_t* window;
  ops::SequenceEntries<const uint8_t> entries;

  __device__ TokenKeys(const Job& job, int64_t t) : keys(Keys::of_token(job, t)), window(job.window_cache.of_row(t)) {
    if (job.entry_cache.exists()) entries = job.entry_cache.of_row(t);
  }
  // Whether it is known where keys of a part lie before the kernel before has ended.
  __device__ bool is_known(const Job& job, int part) const {
    return keys.is_window(part) || (job.selected == nullptr && !job.entry_cache.is_made_by_kernel);
  }
  // Key n of a part, or its last.
  __device__ const uint8_t* find(const Job& job, int64_t t, int part, int n, int bytes) const {
    if (part >= keys.num_parts) return nullptr;
    const int index = keys.index_of(job, t, part, min(n, keys.count_of(part) - 1));
    return keys.is_window(part) ? window + static_cast<int64_t>(index) * bytes : entries.at(index, bytes);
  }
};

// A key's channels for the logits. Lane (g, t) has channels [16 t, 16 t + 16) of each group of 64 of its warp's key g.
template <ops::EntryFormat kFormat, int kBlocks>
struct KeyRow {
  static constexpr int kGroups = kMaxWidth / kGroup;
  // Groups that are loaded before the first is used: fewer warps have more registers.
  static constexpr int kAtOnce = kBlocks == 1 ? 4 : kGroups;
  const KeyLayout<kFormat, kBlocks> layout;
  const uint8_t* key;
  const int first_channel = static_cast<int>(threadIdx.x) % 4 * 16;
  KeyScales scales;
  KeyPiece<16> pieces[kAtOnce];

  __device__ KeyRow(const Job& job, const uint8_t* its_key) : layout{job}, key(its_key) {}
  __device__ void load(int first_group) {
    if (first_group == 0 && layout.fp8_groups() > 0) scales.load(layout.scales(key));
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int group = first_group + n;
      if (group * kGroup < layout.width()) layout.load(key, group, first_channel, pieces[n]);
    }
  }
};

// sums += queries of heads g and g + 8 times 16 channels of key g each, by pairs.
__device__ inline void multiply_channels(const Shared& shared, int channel, const uint32_t (&pairs)[8],
                                         float (&sums)[4]) {
  const int g = static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 low = *reinterpret_cast<const uint4*>(&shared.q[g][channel + 8 * i]);
    const uint4 high = *reinterpret_cast<const uint4*>(&shared.q[g + 8][channel + 8 * i]);
    ptx::mma_bf16(sums, low.x, high.x, low.y, high.y, pairs[4 * i], pairs[4 * i + 1]);
    ptx::mma_bf16(sums, low.z, high.z, low.w, high.w, pairs[4 * i + 2], pairs[4 * i + 3]);
  }
}

// The same of a whole row whose scales aren't all usual ones: rare, and short instead of fast.
template <ops::EntryFormat kFormat, int kBlocks>
__device__ void multiply_unusual_row(const Shared& shared, const KeyRow<kFormat, kBlocks>& row, float (&sums)[4]) {
#pragma unroll 1
  for (int group = 0; group * kGroup < row.layout.width(); ++group) {
    KeyPiece<16> piece;
    row.layout.load(row.key, group, row.first_channel, piece);
    uint32_t pairs[8];
    if (group < row.layout.fp8_groups()) {
      fp8_pairs<4>({piece.words[0], piece.words[1], piece.words[2], piece.words[3]}, row.scales[group], pairs);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) pairs[i] = piece.words[i];
    }
    multiply_channels(shared, group * kGroup + row.first_channel, pairs, sums);
  }
}

// shared.logits of 8 keys by each warp, for all blocks.
template <ops::EntryFormat kFormat, int kBlocks>
__device__ void multiply_keys(const Job& job, Shared& shared, KeyRow<kFormat, kBlocks>& row) {
  constexpr bool kHasFp8 = kFormat == ops::EntryFormat::kKvFp8Bf16;
  using Row = KeyRow<kFormat, kBlocks>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4, first_key = kWarpKeys * Place<kBlocks>::warp();
  float sums[4] = {};
  if (!kHasFp8 || !__any_sync(~0u, !row.scales.are_usual(row.layout.fp8_groups()))) [[likely]] {
    uint32_t seen = 0;
#pragma unroll
    for (int first = 0; first < Row::kGroups; first += Row::kAtOnce) {
      if (first > 0) row.load(first);
#pragma unroll
      for (int n = 0; n < Row::kAtOnce; ++n) {
        const int group = first + n;
        if (group * kGroup >= row.layout.width()) break;
        const uint32_t(&words)[8] = row.pieces[n].words;
        uint32_t pairs[8];
        if (group < row.layout.fp8_groups()) {
          usual_fp8_pairs<4>({words[0], words[1], words[2], words[3]}, usual_pair_scale(row.scales[group]), pairs);
#pragma unroll
          for (int i = 0; i < 4; ++i) seen = seen_e4m3(seen, words[i]);
        } else {
#pragma unroll
          for (int i = 0; i < 8; ++i) pairs[i] = words[i];
        }
        // A NaN's code was multiplied as a number. One NaN in a key is enough: its logits are NaN.
        if (kHasFp8 && (group + 1) * kGroup >= row.layout.width() && (seen & kSeenNan) != 0) pairs[7] = kNanPair;
        multiply_channels(shared, group * kGroup + row.first_channel, pairs, sums);
      }
    }
  } else {
    multiply_unusual_row(shared, row, sums);
  }
#pragma unroll
  for (int rank = 0; rank < kBlocks; ++rank) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float2* at = reinterpret_cast<float2*>(&shared.logits[g + 8 * r][first_key + 2 * t]);
      if constexpr (kBlocks > 1) at = ptx::in_block(at, rank);
      *at = {sums[2 * r] * job.scale, sums[2 * r + 1] * job.scale};
    }
  }
}

}  // namespace tessera::backends::cuda::attention_few
