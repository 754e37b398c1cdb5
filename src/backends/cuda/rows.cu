// SPDX-License-Identifier: Apache-2.0
// Ops on rows: rms_norm (half a warp per row), rope (a thread per pair), hadamard (a thread block per row), cache_write
// (a thread per group of values that share a scale).
#include <cmath>

#include "backends/cuda/kernels.h"
#include "backends/cuda_common/entries.cuh"
#include "backends/cuda_common/lanes.cuh"
#include "backends/cuda_common/launch.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kBlock = 128;

__global__ void rms_norm_kernel(Values x, Values weight, Values out, int64_t width, float eps, int64_t num_rows) {
  const int64_t at = item_index() / kLanes, lane = threadIdx.x % kLanes;
  const int64_t base = (at < num_rows ? at : num_rows - 1) * width;  // the other half of a warp needs this one
  float sum = 0;
  for (int64_t c = lane; c < width; c += kLanes) {
    const float value = x[base + c];
    sum += value * value;
  }
  const float mean = add_lanes(sum) / static_cast<float>(width);
  const float factor = 1 / sqrtf(mean + eps);
  if (at >= num_rows) return;
  for (int64_t c = lane; c < width; c += kLanes) {
    out.store(base + c, x[base + c] * factor * (weight.data != nullptr ? weight[c] : 1.0f));
  }
}

__global__ void rope_kernel(Values x, const int64_t* positions, const float* frequencies, int64_t vectors,
                            int64_t width, int64_t rope_dim, bool is_inverse, int64_t count) {
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

__global__ void hadamard_kernel(Values x, int64_t width, float scale, bool is_fp4) {
  extern __shared__ float s_row[];
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
  if (is_fp4) {
    constexpr int64_t kGroup = numeric::kMxfp4Block;
    for (int64_t i = threadIdx.x * kGroup; i < width; i += kBlock * kGroup) {
      uint8_t codes[kGroup / 2], group_scale;
      numeric::q4_quantize(s_row + i, kGroup, codes, &group_scale);
      numeric::q4_dequantize(codes, &group_scale, kGroup, s_row + i);
    }
    __syncthreads();
  }
  for (int64_t i = threadIdx.x; i < width; i += kBlock) x.store(base + i, s_row[i]);
}

// Values [begin, begin + count) of an entry as they are: FP32 or BF16.
__device__ void write_plain(const Values& target, const Values& rows, int64_t from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) target.store(i, rows[from + i]);
}

// Piece p of an entry is its p-th group; what follows the groups of a key/value entry (the rotary part and the padding)
// is the last piece.
__global__ void cache_write_kernel(Values rows, const int64_t* slots, ops::SequenceBases<uint8_t> cache,
                                   Entries entries, int64_t pieces, int64_t count) {
  const int64_t item = item_index();
  if (item >= count) return;
  const int64_t row = item / pieces, piece = item % pieces, base = row * entries.width;
  if (slots[row] < 0) return;
  uint8_t* entry = cache.of_row(row) + slots[row] * entries.bytes;
  if (entries.format == ops::EntryFormat::kF32 || entries.format == ops::EntryFormat::kBf16) {
    const bool is_bf16 = entries.format == ops::EntryFormat::kBf16;
    const int64_t begin = piece * ops::kKvGroup;
    write_plain({entry + begin * (is_bf16 ? 2 : 4), is_bf16}, rows, base + begin,
                min(ops::kKvGroup, entries.width - begin));
    return;
  }
  float values[ops::kKvGroup];
  if (entries.format == ops::EntryFormat::kIndexFp4) {
    const int64_t begin = piece * ops::kIndexGroup;
    for (int64_t i = 0; i < ops::kIndexGroup; ++i) values[i] = rows[base + begin + i];
    numeric::q4_quantize(values, ops::kIndexGroup, entry + begin / 2, entry + entries.width / 2 + piece);
    return;
  }
  const int64_t groups = entries.nope / ops::kKvGroup;
  if (piece < groups) {
    const int64_t begin = piece * ops::kKvGroup;
    for (int64_t i = 0; i < ops::kKvGroup; ++i) values[i] = rows[base + begin + i];
    numeric::q8_quantize(values, ops::kKvGroup, ops::kKvGroup, entry + begin, entry + entries.at.scales + piece);
    return;
  }
  write_plain({entry + entries.at.rope, entries.format == ops::EntryFormat::kKvFp8Bf16}, rows, base + entries.nope,
              entries.width - entries.nope);
  for (int64_t i = entries.at.scales + groups; i < entries.at.end; ++i) entry[i] = 0;
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

void rms_norm(const ops::RmsNorm::Desc& desc, const ops::RmsNorm::Args& args, device::Queue& queue) {
  launch("rms_norm", queue, rms_norm_kernel, grid_for(args.num_rows * kLanes, kBlock), kBlock, 0, values_of(args.x),
         values_of(args.weight), values_of(args.out), desc.width, desc.eps, args.num_rows);
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
  launch("cache_write", queue, cache_write_kernel, grid_for(count, kBlock), kBlock, 0, values_of(args.rows), args.slots,
         args.cache, entries_of(desc.layout), pieces, count);
}

}  // namespace tessera::backends::cuda
