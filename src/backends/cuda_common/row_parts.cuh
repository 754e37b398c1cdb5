// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a thread block does to a row in shared memory: the parts of rms_norm, rope, hadamard and cache_write, which are
// ops of their own and steps of a fused one.
#include <cmath>

#include "backends/cuda_common/entries.cuh"
#include "backends/cuda_common/lanes.cuh"
#include "numeric/e2m1_rounded.h"

namespace tessera::backends::cuda_common {

constexpr int kPerThread = 8;  // values of a row that a thread has on their way at once

// Calls function(i, c) for this thread's columns c of a row, i of each batch of kEach.
template <int kEach = kPerThread, class Function>
__device__ void for_columns(int64_t begin, int64_t width, const Function& function) {
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t c = begin + threadIdx.x + i * blockDim.x;
    if (c < width) function(i, c);
  }
}

// 1 / sqrt(mean of squares + eps) of row[0, width), the sum in the order of the contract. All of a warp takes part; its
// halves may have two rows.
template <class Row>
__device__ float norm_factor(const Row& row, int64_t width, float eps) {
  float sum = 0;
#pragma unroll 16
  for (int64_t c = threadIdx.x % kLanes; c < width; c += kLanes) sum += row[c] * row[c];
  const float mean = add_lanes(sum) / static_cast<float>(width);
  return 1 / sqrtf(mean + eps);
}

// This thread's columns of a row. What type they are of is asked once, so that all loads are on their way together.
template <int kEach = kPerThread>
__device__ void load_columns(const Values& x, int64_t base, int64_t begin, int64_t width, float (&values)[kEach]) {
  if (x.is_bf16) {
    uint16_t bits[kEach];
    for_columns<kEach>(begin, width,
                       [&](int i, int64_t c) { bits[i] = static_cast<const uint16_t*>(x.data)[base + c]; });
    for_columns<kEach>(begin, width, [&](int i, int64_t) { values[i] = numeric::bf16_to_float(bits[i]); });
  } else {
    for_columns<kEach>(begin, width,
                       [&](int i, int64_t c) { values[i] = static_cast<const float*>(x.data)[base + c]; });
  }
}
// Of a norm's weights, which are 1 where there are none.
template <int kEach = kPerThread>
__device__ void load_weights(const Values& weight, int64_t begin, int64_t width, float (&weights)[kEach]) {
  if (weight.data != nullptr) return load_columns<kEach>(weight, 0, begin, width, weights);
#pragma unroll
  for (float& of : weights) of = 1;
}

// s_row[0, width), in shared memory, = rms_norm of x from x[begin] on, rounded as x is. All threads; other threads'
// values are there after the next barrier.
__device__ inline void norm_row(float* s_row, const Values& x, int64_t begin, const Values& weight, int64_t width,
                                float eps) {
  __shared__ float s_factor;
  for (int64_t from = 0; from < width; from += kPerThread * static_cast<int64_t>(blockDim.x)) {
    float values[kPerThread];
    load_columns(x, begin, from, width, values);
    for_columns(from, width, [&](int i, int64_t c) { s_row[c] = values[i]; });
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const float factor = norm_factor(s_row, width, eps);
    if (threadIdx.x == 0) s_factor = factor;
  }
  __syncthreads();
  for (int64_t c = threadIdx.x; c < width; c += blockDim.x) {
    s_row[c] = round_to(x.is_bf16, s_row[c] * s_factor * (weight.data != nullptr ? weight[c] : 1.0f));
  }
}

// out[base, base + width) = rms_norm of x's, by a whole thread block: all threads bring the row into s_row, in shared
// memory, and half a warp sums its squares in the order of the contract. Weights, which no kernel makes, are on their
// way before `wait` is called.
template <class Wait>
__device__ void norm_stored_row(float* s_row, const Values& x, const Values& weight, const Values& out, int64_t base,
                                int64_t width, float eps, const Wait& wait) {
  __shared__ float s_factor;
  const int64_t batch = kPerThread * static_cast<int64_t>(blockDim.x);
  float values[kPerThread], weights[kPerThread];
  load_weights(weight, 0, width, weights);
  wait();
  for (int64_t begin = 0; begin < width; begin += batch) {
    load_columns(x, base, begin, width, values);
    for_columns(begin, width, [&](int i, int64_t c) { s_row[c] = values[i]; });
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const float factor = norm_factor(s_row, width, eps);
    if (threadIdx.x == 0) s_factor = factor;
  }
  __syncthreads();
  const float factor = s_factor;
  for (int64_t begin = 0; begin < width; begin += batch) {
    if (width > batch) {  // else they are still there
      load_columns(x, base, begin, width, values);
      load_weights(weight, begin, width, weights);
    }
    for_columns(begin, width, [&](int i, int64_t c) { out.store(base + c, values[i] * factor * weights[i]); });
  }
}

// Sine and cosine in FP64, rounded once.
__device__ inline double rotary_angle(int64_t position, float frequency) {
  return static_cast<double>(static_cast<float>(position) * frequency);
}
__device__ inline float rotary_cosine(double angle) {
  return static_cast<float>(cos(angle));
}
__device__ inline float rotary_sine(double angle, bool is_inverse) {
  return static_cast<float>(sin(angle)) * (is_inverse ? -1.0f : 1.0f);
}
__device__ inline float rotated_first(float a, float b, float cosine, float sine) {
  return a * cosine - b * sine;
}
__device__ inline float rotated_second(float a, float b, float cosine, float sine) {
  return a * sine + b * cosine;
}

// The larger magnitude, NaN where there is one (numeric::abs_max).
__device__ inline float larger_magnitude(float max, float other) {
  return other != other || other > max ? other : max;
}
// The largest of kCount neighbouring lanes.
template <int kCount>
__device__ float lanes_abs_max(float value) {
  float max = fabsf(value);
#pragma unroll
  for (int step = kCount / 2; step > 0; step /= 2) max = larger_magnitude(max, __shfl_xor_sync(~0u, max, step));
  return max;
}
__device__ inline float warp_abs_max(float value) {
  return lanes_abs_max<32>(value);
}

// numeric::q4_code and back. Scales are 2^-126 and more: dividing by one is multiplying with its reciprocal.
__device__ inline float q4_rounded(float value, uint8_t scale) {
  const float inverse = numeric::e8m0_to_float(static_cast<uint8_t>(254 - scale));
  return (scale == numeric::kE8m0Nan ? 0 : numeric::e2m1_rounded(value * inverse)) * numeric::e8m0_to_float(scale);
}

inline float hadamard_scale(int64_t width) {
  return static_cast<float>(1 / std::sqrt(static_cast<double>(width)));
}
// s_row through the hadamard op. All threads; other threads' values are there after the next barrier.
__device__ inline void hadamard_row(float* s_row, int64_t width, float scale, bool is_bf16, bool is_fp4) {
  const int half = static_cast<int>(width / 2), threads = static_cast<int>(blockDim.x);
  for (int step = 1; step <= half; step *= 2) {
    __syncthreads();
    for (int pair = static_cast<int>(threadIdx.x); pair < half; pair += threads) {
      const int i = 2 * pair - (pair & (step - 1));  // pair / step * 2 * step + pair % step
      const float a = s_row[i], b = s_row[i + step];
      s_row[i] = a + b;
      s_row[i + step] = a - b;
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < width; i += threads) s_row[i] = round_to(is_bf16, s_row[i] * scale);
  __syncthreads();
  if (is_fp4) {  // a warp per group; the arithmetic is that of numeric::q4_quantize and back
    static_assert(numeric::kMxfp4Block == 32);
    for (int i = static_cast<int>(threadIdx.x); i < width; i += threads) {
      const uint8_t group_scale = numeric::q4_scale(warp_abs_max(s_row[i]));
      s_row[i] = q4_rounded(s_row[i], group_scale);
    }
  }
}

// Values [begin, begin + count) of an entry as they are: FP32 or BF16. A warp writes.
__device__ inline void write_plain(const Values& target, const Values& rows, int64_t from, int64_t count) {
  for (int64_t i = threadIdx.x % 32; i < count; i += 32) target.store(i, rows[from + i]);
}

// Piece p of an entry is its p-th group; what follows the groups of a key/value entry (the rotary part and the padding)
// is the last piece. A warp writes one, of the row from rows[base] on; the arithmetic is that of numeric::q8_quantize
// and q4_quantize.
__device__ inline void write_piece(const Values& rows, int64_t base, int64_t piece, const Entries& entries,
                                   uint8_t* entry) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (entries.format == ops::EntryFormat::kF32 || entries.format == ops::EntryFormat::kBf16) {
    const bool is_bf16 = entries.format == ops::EntryFormat::kBf16;
    const int64_t begin = piece * ops::kKvGroup;
    write_plain({entry + begin * (is_bf16 ? 2 : 4), is_bf16}, rows, base + begin,
                min(ops::kKvGroup, entries.width - begin));
    return;
  }
  if (entries.format == ops::EntryFormat::kIndexFp4) {
    static_assert(ops::kIndexGroup == 32);
    const int64_t begin = piece * ops::kIndexGroup;
    const float value = rows[base + begin + lane];
    const uint8_t scale = numeric::q4_scale(warp_abs_max(value)), code = numeric::q4_code(value, scale);
    const uint8_t next = static_cast<uint8_t>(__shfl_down_sync(~0u, static_cast<unsigned>(code), 1));
    if (lane % 2 == 0) entry[(begin + lane) / 2] = static_cast<uint8_t>(code | next << 4);
    if (lane == 0) entry[entries.width / 2 + piece] = scale;
    return;
  }
  const int64_t groups = entries.nope / ops::kKvGroup;
  if (piece < groups) {
    static_assert(ops::kKvGroup == 64);
    const int64_t begin = piece * ops::kKvGroup;
    const float a = rows[base + begin + lane], b = rows[base + begin + 32 + lane];
    const float max_a = warp_abs_max(a), max_b = warp_abs_max(b);
    const uint8_t scale = numeric::q8_scale(max_b != max_b || max_b > max_a ? max_b : max_a);
    entry[begin + lane] = numeric::q8_code(a, scale);
    entry[begin + 32 + lane] = numeric::q8_code(b, scale);
    if (lane == 0) entry[entries.at.scales + piece] = scale;
    return;
  }
  write_plain({entry + entries.at.rope, entries.format == ops::EntryFormat::kKvFp8Bf16}, rows, base + entries.nope,
              entries.width - entries.nope);
  for (int64_t i = entries.at.scales + groups + lane; i < entries.at.end; i += 32) entry[i] = 0;
}

inline int64_t num_pieces(const ops::EntryLayout& layout) {
  switch (layout.format) {
    case ops::EntryFormat::kF32:
    case ops::EntryFormat::kBf16:
      return ceil_div(layout.width, ops::kKvGroup);
    case ops::EntryFormat::kIndexFp4:
      return layout.width / ops::kIndexGroup;
    case ops::EntryFormat::kKvFp8Bf16:
    case ops::EntryFormat::kKvFp8F32:
      break;
  }
  return layout.nope_dim() / ops::kKvGroup + 1;
}

}  // namespace tessera::backends::cuda_common
