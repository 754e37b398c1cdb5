// SPDX-License-Identifier: Apache-2.0
// Ops on rows: rms_norm and hadamard (a thread block per row), rope (a thread per pair of channels at a time),
// cache_write (a warp per group of values that share a scale).
#include <algorithm>
#include <cmath>

#include "backends/cuda/kernels.h"
#include "backends/cuda/many_vectors.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/row_parts.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kBlock = 128, kMaxNormThreads = 512;

__global__ void __launch_bounds__(kMaxNormThreads)
    rms_norm_kernel(Values x, Values weight, Values out, int64_t width, float eps) {
  norm_stored_row(dynamic_shared<float>(), x, weight, out, blockIdx.x * width, width, eps, wait_for_previous);
}

// Grid: tokens by groups of `group` vectors, which share sines and cosines.
__global__ void __launch_bounds__(kBlock)
    rope_kernel(Values x, const int64_t* positions, const float* frequencies, int vectors, int width, int rope_dim,
                bool is_inverse, int group) {
  float* s_turns = dynamic_shared<float>();  // cosines, then sines
  const int pairs = rope_dim / 2, thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < rope_dim; i += kBlock) {
    const double angle = rotary_angle(positions[blockIdx.x], frequencies[i % pairs]);
    s_turns[i] = i < pairs ? rotary_cosine(angle) : rotary_sine(angle, is_inverse);
  }
  wait_for_previous();  // positions are a step's inputs, which no kernel makes
  __syncthreads();
  const int first = static_cast<int>(blockIdx.y) * group, count = min(group, vectors - first);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * vectors + first;
  for (int item = thread; item < count * pairs; item += kBlock) {
    const int vector = item / pairs, i = item - vector * pairs;
    const int64_t at = (row + vector + 1) * width - rope_dim + 2 * i;
    const float a = x[at], b = x[at + 1], cosine = s_turns[i], sine = s_turns[pairs + i];
    x.store(at, rotated_first(a, b, cosine, sine));
    x.store(at + 1, rotated_second(a, b, cosine, sine));
  }
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
  ManyVectors all{.x = values_of(args.x), .out = values_of(args.out), .num_rows = 1};
  all.vectors = static_cast<int>(args.num_rows), all.width = static_cast<int>(desc.width);
  all.has_norm = true, all.eps = desc.eps;
  if (args.weight.data == nullptr && run_many_vectors("rms_norm", all, queue)) return;
  const NormRows rows{all.x, values_of(args.weight), all.out, args.num_rows, all.width, desc.eps};
  if (run_norm_rows("rms_norm", rows, queue)) return;
  const unsigned threads = desc.width <= kBlock * kPerThread / 2 ? kBlock : kMaxNormThreads;
  launch("rms_norm", queue, rms_norm_kernel, grid_for(args.num_rows, 1), threads,
         static_cast<size_t>(desc.width) * sizeof(float), values_of(args.x), values_of(args.weight),
         values_of(args.out), desc.width, desc.eps);
}

void rope(const ops::Rope::Desc& desc, const ops::Rope::Args& args, device::Queue& queue) {
  // With few tokens a pair for each thread, with many less work for sines and cosines.
  constexpr int64_t kManyTokens = 8, kManyVectors = 32;  // tokens to a multiprocessor
  const int64_t few = std::max<int64_t>(1, kBlock / std::max<int64_t>(1, desc.rope_dim / 2));
  const int64_t group = args.num_tokens >= kManyTokens * multiprocessors() ? kManyVectors : few;
  const dim3 grid(static_cast<unsigned>(args.num_tokens), static_cast<unsigned>(ceil_div(desc.vectors, group)));
  launch("rope", queue, rope_kernel, grid, kBlock, static_cast<size_t>(desc.rope_dim) * sizeof(float),
         values_of(args.x), args.positions, args.frequencies, desc.vectors, desc.width, desc.rope_dim, desc.is_inverse,
         group);
}

void hadamard(const ops::Hadamard::Desc& desc, const ops::Hadamard::Args& args, device::Queue& queue) {
  ManyVectors all{.x = values_of(args.x), .out = values_of(args.x), .num_rows = 1};
  all.vectors = static_cast<int>(args.num_rows), all.width = static_cast<int>(desc.width);
  all.has_hadamard = true, all.hadamard_scale = hadamard_scale(desc.width), all.is_fp4 = desc.is_fp4;
  if (run_many_vectors("hadamard", all, queue)) return;
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
