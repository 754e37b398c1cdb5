// SPDX-License-Identifier: Apache-2.0
// Ops on rows: rms_norm and hadamard (a thread block per row), rope (a thread per pair), cache_write (a warp per group
// of values that share a scale).
#include <cmath>

#include "backends/cuda/kernels.h"
#include "backends/cuda_common/entries.cuh"
#include "backends/cuda_common/lanes.cuh"
#include "backends/cuda_common/launch.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kBlock = 128, kMaxNormThreads = 512;

constexpr int kPerThread = 8;  // values of a row that a thread has on their way at once

// Calls function(i, c) for this thread's columns c of a row, i of each batch of kPerThread.
template <class Function>
__device__ void for_columns(int64_t begin, int64_t width, const Function& function) {
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t c = begin + threadIdx.x + i * blockDim.x;
    if (c < width) function(i, c);
  }
}

// All threads bring the row and its squares, half a warp sums these in the order of the contract.
__global__ void __launch_bounds__(kMaxNormThreads)
    rms_norm_kernel(Values x, Values weight, Values out, int64_t width, float eps) {
  float* s_squares = dynamic_shared<float>();
  __shared__ float s_factor;
  const int64_t base = blockIdx.x * width, batch = kPerThread * static_cast<int64_t>(blockDim.x);
  float values[kPerThread], weights[kPerThread];
  const auto load_weights = [&](int64_t begin) {
    for_columns(begin, width, [&](int i, int64_t c) { weights[i] = weight.data != nullptr ? weight[c] : 1.0f; });
  };
  load_weights(0);
  wait_for_previous();
  for (int64_t begin = 0; begin < width; begin += batch) {
    for_columns(begin, width, [&](int i, int64_t c) { values[i] = x[base + c]; });
    for_columns(begin, width, [&](int i, int64_t c) { s_squares[c] = values[i] * values[i]; });
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    float sum = 0;
#pragma unroll 16
    for (int64_t c = threadIdx.x % kLanes; c < width; c += kLanes) sum += s_squares[c];
    const float mean = add_lanes(sum) / static_cast<float>(width);
    if (threadIdx.x == 0) s_factor = 1 / sqrtf(mean + eps);
  }
  __syncthreads();
  const float factor = s_factor;
  for (int64_t begin = 0; begin < width; begin += batch) {
    if (width > batch) {  // else they are still there
      for_columns(begin, width, [&](int i, int64_t c) { values[i] = x[base + c]; });
      load_weights(begin);
    }
    for_columns(begin, width, [&](int i, int64_t c) { out.store(base + c, values[i] * factor * weights[i]); });
  }
}

__global__ void rope_kernel(Values x, const int64_t* positions, const float* frequencies, int64_t vectors,
                            int64_t width, int64_t rope_dim, bool is_inverse, int64_t count) {
  wait_for_previous();
  const int64_t item = item_index(), pairs = rope_dim / 2;
  if (item >= count) return;
  const int64_t i = item % pairs, row = item / pairs;
  const double angle = static_cast<double>(static_cast<float>(positions[row / vectors]) * frequencies[i]);
  const float cosine = static_cast<float>(cos(angle));
  const float sine = static_cast<float>(sin(angle)) * (is_inverse ? -1.0f : 1.0f);
  const int64_t at = (row + 1) * width - rope_dim + 2 * i;
  const float a = x[at], b = x[at + 1];
  x.store(at, a * cosine - b * sine);
  x.store(at + 1, a * sine + b * cosine);
}

// The largest magnitude over the warp, NaN where there is one (numeric::abs_max).
__device__ float warp_abs_max(float value) {
  float max = fabsf(value);
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(~0u, max, step);
    max = other != other || other > max ? other : max;
  }
  return max;
}

__global__ void hadamard_kernel(Values x, int64_t width, float scale, bool is_fp4) {
  wait_for_previous();
  float* s_row = dynamic_shared<float>();
  const int64_t base = blockIdx.x * width;
  for (int64_t i = threadIdx.x; i < width; i += kBlock) s_row[i] = x[base + i];
  for (int64_t step = 1; step < width; step *= 2) {
    __syncthreads();
    for (int64_t pair = threadIdx.x; pair < width / 2; pair += kBlock) {
      const int64_t i = pair / step * 2 * step + pair % step;
      const float a = s_row[i], b = s_row[i + step];
      s_row[i] = a + b;
      s_row[i + step] = a - b;
    }
  }
  __syncthreads();
  for (int64_t i = threadIdx.x; i < width; i += kBlock) s_row[i] = round_to(x.is_bf16, s_row[i] * scale);
  __syncthreads();
  if (is_fp4) {  // a warp per group; the arithmetic is that of numeric::q4_quantize and back
    static_assert(numeric::kMxfp4Block == 32);
    for (int64_t i = threadIdx.x; i < width; i += kBlock) {
      const uint8_t group_scale = numeric::q4_scale(warp_abs_max(s_row[i]));
      s_row[i] = numeric::e2m1_to_float(numeric::q4_code(s_row[i], group_scale)) * numeric::e8m0_to_float(group_scale);
    }
  }
  for (int64_t i = threadIdx.x; i < width; i += kBlock) x.store(base + i, s_row[i]);
}

// Values [begin, begin + count) of an entry as they are: FP32 or BF16. A warp writes.
__device__ void write_plain(const Values& target, const Values& rows, int64_t from, int64_t count) {
  for (int64_t i = threadIdx.x % 32; i < count; i += 32) target.store(i, rows[from + i]);
}

// Piece p of an entry is its p-th group; what follows the groups of a key/value entry (the rotary part and the padding)
// is the last piece. A warp has a piece; the arithmetic is that of numeric::q8_quantize and q4_quantize.
__global__ void cache_write_kernel(Values rows, const int64_t* slots, ops::PagedEntries<uint8_t> cache, Entries entries,
                                   int64_t pieces, int64_t count) {
  wait_for_previous();
  const int64_t item = item_index() / 32;
  const int lane = threadIdx.x % 32;
  if (item >= count) return;
  const int64_t row = item / pieces, piece = item % pieces, base = row * entries.width;
  if (slots[row] < 0) return;
  uint8_t* entry = cache.of_row(row).at(slots[row], entries.bytes);
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

int64_t num_pieces(const ops::EntryLayout& layout) {
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

}  // namespace

bool rms_norm_supports(const ops::RmsNorm::Desc& desc, std::string& why_not) {
  constexpr int64_t kMostShared = 48 << 10;
  if (desc.width * static_cast<int64_t>(sizeof(float)) <= kMostShared - 1024) return true;
  why_not = "needs rows that fit into a multiprocessor's shared memory, not " + std::to_string(desc.width) + " values";
  return false;
}

void rms_norm(const ops::RmsNorm::Desc& desc, const ops::RmsNorm::Args& args, device::Queue& queue) {
  const unsigned threads = desc.width <= kBlock * kPerThread / 2 ? kBlock : kMaxNormThreads;
  launch("rms_norm", queue, rms_norm_kernel, grid_for(args.num_rows, 1), threads,
         static_cast<size_t>(desc.width) * sizeof(float), values_of(args.x), values_of(args.weight),
         values_of(args.out), desc.width, desc.eps);
}

void rope(const ops::Rope::Desc& desc, const ops::Rope::Args& args, device::Queue& queue) {
  const int64_t count = args.num_tokens * desc.vectors * (desc.rope_dim / 2);
  launch("rope", queue, rope_kernel, grid_for(count, kBlock), kBlock, 0, values_of(args.x), args.positions,
         args.frequencies, desc.vectors, desc.width, desc.rope_dim, desc.is_inverse, count);
}

void hadamard(const ops::Hadamard::Desc& desc, const ops::Hadamard::Args& args, device::Queue& queue) {
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(desc.width)));
  launch("hadamard", queue, hadamard_kernel, grid_for(args.num_rows, 1), kBlock,
         static_cast<size_t>(desc.width) * sizeof(float), values_of(args.x), desc.width, scale, desc.is_fp4);
}

void cache_write(const ops::CacheWrite::Desc& desc, const ops::CacheWrite::Args& args, device::Queue& queue) {
  const int64_t pieces = num_pieces(desc.layout), count = args.num_rows * pieces;
  launch("cache_write", queue, cache_write_kernel, grid_for(count * 32, kBlock), kBlock, 0, values_of(args.rows),
         args.slots, args.cache, entries_of(desc.layout), pieces, count);
}

}  // namespace tessera::backends::cuda
