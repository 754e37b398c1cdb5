// SPDX-License-Identifier: Apache-2.0
#pragma once
// The second half of attention_few.cuh: probabilities of a part's logits, and their products with values.
#include "backends/cuda/attention_few_keys.cuh"

namespace tessera::backends::cuda::attention_few {

// Probabilities, maximum and sum of every kOwnWarps-th head from `first` on, by a warp: those of sm90/attention.cu, bit
// for bit. Lane (half, t, quarter) has keys 64 half + 16 quarter + 8 i + 2 t + j, as the sum wants them. Heads side by
// side: a warp alone would wait for each of a head's steps.
template <int kOwnWarps>
__device__ inline void soften(Shared& shared, int first, int count) {
  constexpr int kOwnHeads = kHeads / kOwnWarps;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first_key = lane / 16 * 64 + lane % 4 * 16 + lane / 4 % 4 * 2;
  float p[kOwnHeads][2][2], max[kOwnHeads], sum[kOwnHeads];
#pragma unroll
  for (int h = 0; h < kOwnHeads; ++h) {
    max[h] = -__builtin_huge_valf();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int n = first_key + 8 * i;
      const float2 two = *reinterpret_cast<const float2*>(&shared.logits[first + h * kOwnWarps][n]);
      p[h][i][0] = n < count ? two.x : -__builtin_huge_valf();
      p[h][i][1] = n + 1 < count ? two.y : -__builtin_huge_valf();
      max[h] = fmaxf(fmaxf(max[h], p[h][i][0]), p[h][i][1]);  // a NaN shows in the sum
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
#pragma unroll
    for (int h = 0; h < kOwnHeads; ++h) max[h] = fmaxf(max[h], __shfl_xor_sync(~0u, max[h], step));
  }
#pragma unroll
  for (int h = 0; h < kOwnHeads; ++h) {
    const float base = probability_base(max[h]);
    sum[h] = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        p[h][i][j] = probability(p[h][i][j], base);
        sum[h] += p[h][i][j];
      }
      *reinterpret_cast<uint32_t*>(&shared.probabilities[first + h * kOwnWarps][first_key + 8 * i]) =
          numeric::bf16_from_float(p[h][i][0]) | static_cast<uint32_t>(numeric::bf16_from_float(p[h][i][1])) << 16;
    }
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int h = 0; h < kOwnHeads; ++h) sum[h] += __shfl_xor_sync(~0u, sum[h], step);
  }
#pragma unroll
  for (int h = 0; h < kOwnHeads; ++h) {
    const int head = first + h * kOwnWarps;
    if (lane == 0) shared.max[head] = sum[h] != sum[h] ? sum[h] : max[h], shared.sum[head] = sum[h];
  }
}

// Values of a part: sums[j] = probabilities times channels 32 warp + 4 c + j, c a column of the product, by steps of 16
// keys. A lane has 4 channels of 4 keys of each.
constexpr int kChannels = 4, kSteps = kPart / 16;

template <ops::EntryFormat kFormat, int kBlocks>
struct Values {
  // Steps that are on their way: fewer warps have more registers.
  static constexpr int kAhead = kBlocks == 1 ? 2 : kSteps;
  const KeyLayout<kFormat, kBlocks> layout;
  const Shared& shared;
  const int group, channel;  // of a group
  KeyPiece<kChannels> pieces[kAhead][4];

  __device__ Values(const Job& job, const Shared& its_shared, int warp)
      : layout{job},
        shared(its_shared),
        group(kWarpChannels * warp / kGroup),
        channel(kWarpChannels * warp % kGroup + kChannels * (static_cast<int>(threadIdx.x) % 32 / 4)) {}
  __device__ bool are_there() const { return group * kGroup < layout.width(); }
  __device__ bool are_fp8() const { return group < layout.fp8_groups(); }

  __device__ void load() {
    if (!are_there()) return;
    if (are_fp8()) {
      load_first<true>();
    } else {
      load_first<false>();
    }
  }
  __device__ void multiply(int count, float (&sums)[kChannels][4]) {
    if (!are_there()) return;
    if (!are_fp8()) {
      multiply_steps<false, true>(count, sums);
    } else if (*reinterpret_cast<const uint32_t*>(shared.has_unusual_scale) == 0) [[likely]] {
      multiply_steps<true, true>(count, sums);
    } else {
#pragma unroll 1
      for (int step = 0; 16 * step < count; ++step) {
        load_step<true>(step, pieces[0]);
        multiply_step<true, false>(step, pieces[0], sums);
      }
    }
  }

 private:
  using Step = KeyPiece<kChannels>[4];

  template <bool kIsFp8>
  __device__ void load_first() {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load_step<kIsFp8>(n, pieces[n]);
  }
  template <bool kIsFp8>
  __device__ void load_step(int step, Step& into) const {
    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const KeyPair two = shared.keys[8 * step + 2 * i + t];
      layout.template load<kIsFp8>(two.at[0], group, channel, into[i]);
      layout.template load<kIsFp8>(two.at[1], group, channel, into[i + 1]);
    }
  }
  template <bool kIsFp8, bool kAreUsual>
  __device__ void multiply_steps(int count, float (&sums)[kChannels][4]) {
    // Not all unrolled if there is a choice: instructions that have not run lately seem to be waited for
    // (docs/performance/hopper.md, "A step kernel by kernel").
#pragma unroll 1
    for (int first = 0; first < kSteps && 16 * first < count; first += kAhead) {
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        if (16 * (first + n) >= count) break;
        multiply_step<kIsFp8, kAreUsual>(first + n, pieces[n], sums);
        if (first + n + kAhead < kSteps) load_step<kIsFp8>(first + n + kAhead, pieces[n]);
      }
    }
  }
  template <bool kIsFp8, bool kAreUsual>
  __device__ void multiply_step(int step, const Step& values, float (&sums)[kChannels][4]) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    const auto pair_at = [](const uint16_t* at) { return *reinterpret_cast<const uint32_t*>(at); };
    const uint16_t* low = &shared.probabilities[g][16 * step + 2 * t];
    const uint16_t* high = &shared.probabilities[g + 8][16 * step + 2 * t];
    uint32_t a[4] = {pair_at(low), pair_at(high), pair_at(low + 8), pair_at(high + 8)};
    uint32_t first[kChannels], second[kChannels];
    key_pairs<kIsFp8>(values[0], values[1], first);
    key_pairs<kIsFp8>(values[2], values[3], second);
    if constexpr (kIsFp8) {
      const uint16_t* scales = &shared.scales[group][16 * step + 2 * t];
      const uint32_t near = pair_at(scales), far = pair_at(scales + 8);
      if constexpr (kAreUsual) {
        // Probabilities take the scales, which are fewer: exact, they are powers of two.
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = ptx::multiply_bf16x2(a[i], usual_pair_scale(i < 2 ? near : far));
      } else {
        // Values take them: a probability times a great one may be infinite where the product is not.
        const PairScale near_scale = pair_scale(near & 0xFFFF, near >> 16);
        const PairScale far_scale = pair_scale(far & 0xFFFF, far >> 16);
#pragma unroll
        for (int j = 0; j < kChannels; ++j) {
          first[j] = scaled_key_pair(first[j], near_scale), second[j] = scaled_key_pair(second[j], far_scale);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kChannels; ++j) ptx::mma_bf16(sums[j], a[0], a[1], a[2], a[3], first[j], second[j]);
  }
};

// What a lane holds of head g + 8 r: 8 channels from 32 warp + 8 t on, in order.
constexpr int kHeld = 2 * kChannels;
__device__ inline float& output_of(float (&sums)[kChannels][4], int r, int i) {
  return sums[i % kChannels][2 * r + i / kChannels];
}

}  // namespace tessera::backends::cuda::attention_few
