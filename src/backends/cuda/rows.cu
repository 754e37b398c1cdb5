// SPDX-License-Identifier: Apache-2.0
// Ops on rows: rms_norm and hadamard (a thread block per row), rope (a thread per pair), cache_write (a warp per group
// of values that share a scale).
#include <cmath>

#include "backends/cuda/kernels.h"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/row_parts.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kBlock = 128, kMaxNormThreads = 512;

// All threads bring the row, half a warp sums its squares in the order of the contract.
__global__ void __launch_bounds__(kMaxNormThreads)
    rms_norm_kernel(Values x, Values weight, Values out, int64_t width, float eps) {
  float* s_row = dynamic_shared<float>();
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
  const double angle = rotary_angle(positions[row / vectors], frequencies[i]);
  const float cosine = rotary_cosine(angle), sine = rotary_sine(angle, is_inverse);
  const int64_t at = (row + 1) * width - rope_dim + 2 * i;
  const float a = x[at], b = x[at + 1];
  x.store(at, rotated_first(a, b, cosine, sine));
  x.store(at + 1, rotated_second(a, b, cosine, sine));
}

__global__ void hadamard_kernel(Values x, int64_t width, float scale, bool is_fp4) {
  wait_for_previous();
  float* s_row = dynamic_shared<float>();
  const int64_t base = blockIdx.x * width;
  for (int64_t i = threadIdx.x; i < width; i += kBlock) s_row[i] = x[base + i];
  hadamard_row(s_row, width, scale, x.is_bf16, is_fp4);
  for (int64_t i = threadIdx.x; i < width; i += kBlock) x.store(base + i, s_row[i]);
}

// A warp has a piece of an entry.
__global__ void cache_write_kernel(Values rows, const int64_t* slots, ops::PagedEntries<uint8_t> cache, Entries entries,
                                   int64_t pieces, int64_t count) {
  wait_for_previous();
  const int64_t item = item_index() / 32;
  if (item >= count) return;
  const int64_t row = item / pieces, piece = item % pieces, base = row * entries.width;
  if (slots[row] < 0) return;
  uint8_t* entry = cache.of_row(row).at(slots[row], entries.bytes);
  write_piece(rows, base, piece, entries, entry);
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
  launch("hadamard", queue, hadamard_kernel, grid_for(args.num_rows, 1), kBlock,
         static_cast<size_t>(desc.width) * sizeof(float), values_of(args.x), desc.width, hadamard_scale(desc.width),
         desc.is_fp4);
}

void cache_write(const ops::CacheWrite::Desc& desc, const ops::CacheWrite::Args& args, device::Queue& queue) {
  const int64_t pieces = num_pieces(desc.layout), count = args.num_rows * pieces;
  launch("cache_write", queue, cache_write_kernel, grid_for(count * 32, kBlock), kBlock, 0, values_of(args.rows),
         args.slots, args.cache, entries_of(desc.layout), pieces, count);
}

}  // namespace tessera::backends::cuda
