// SPDX-License-Identifier: Apache-2.0
// norm_rope: a thread block per vector of any of the sets. What bounds it is latency: one load of the vector, a serial
// sum of squares, one barrier, and another where a vector is stored in a cache or transformed. Sets of so many vectors
// that bytes count go to many_vectors.cu.
#include <algorithm>
#include <type_traits>

#include "backends/cuda/kernels.h"
#include "backends/cuda/many_vectors.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/row_parts.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kWarp = 32, kBatch = 1024;  // values of a vector that a block has at once
// Threads of a block: of few vectors so many that a thread has a value or two and a warp at most a piece of an entry,
// so that hardly anything is done one after the other.
constexpr int kBlock = 128, kWideBlock = 512;
constexpr int64_t kWideBlocksEach = 2;  // on a multiprocessor at most, beside those of another kernel

struct Set {
  int64_t end;  // of the set's blocks
  Values x, weight;
  const int64_t *positions, *slots;  // slots null: not stored
  const float* frequencies;
  ops::PagedEntries<uint8_t> cache;
  Entries entries;
  int pieces, vectors, width, rope_dim;
  float eps, hadamard_scale;
  bool has_norm, is_inverse, has_hadamard, is_fp4;
};

struct Job {
  Set sets[ops::NormRope::kMostSets];
};

// Sines and cosines are worked out while the kernel before is still at work: positions and slots are a step's inputs,
// which no kernel makes.
template <int kBlock>
__global__ void __launch_bounds__(kBlock) norm_rope_kernel(const __grid_constant__ Job job) {
  float* s_row = dynamic_shared<float>();
  int64_t vector = blockIdx.x;
  int n = 0;
  while (vector >= job.sets[n].end) ++n;
  if (n > 0) vector -= job.sets[n - 1].end;
  const Set& set = job.sets[n];
  const int width = set.width, pairs = set.rope_dim / 2, thread = static_cast<int>(threadIdx.x);
  float *s_out = s_row + width, *s_turns = s_out + width;  // of turns cosines, then sines
  const int64_t row = vector / set.vectors, base = vector * width;
  constexpr int kEach = kBatch / kBlock;
  float weights[kEach];
  if (set.has_norm) load_weights<kEach>(set.weight, 0, width, weights);
  const int64_t position = set.positions[row], slot = set.slots == nullptr ? 0 : set.slots[row];
  for (int i = thread; i < 2 * pairs; i += kBlock) {
    const double angle = rotary_angle(position, set.frequencies[i % pairs]);
    s_turns[i] = i < pairs ? rotary_cosine(angle) : rotary_sine(angle, set.is_inverse);
  }

  wait_for_previous();
  if (slot < 0) return;  // nobody's
  float values[kEach];
  for (int begin = 0; begin < width; begin += kBatch) {
    load_columns<kEach>(set.x, base, begin, width, values);
    for_columns<kEach>(begin, width, [&](int i, int64_t c) { s_row[c] = values[i]; });
  }
  __syncthreads();
  // By every warp for itself, which takes no longer than by one, and no barrier.
  const float factor = set.has_norm ? norm_factor(s_row, width, set.eps) : 1.0f;
  const bool is_bf16 = set.x.is_bf16, stays = set.has_hadamard || set.slots != nullptr;
  const int rope_begin = width - set.rope_dim;
  // What no step changes is where it was.
  const int first = set.has_norm ? 0 : rope_begin;
  for (int begin = 0; begin < width; begin += kBatch) {
    if (begin > 0 && set.has_norm) load_weights<kEach>(set.weight, begin, width, weights);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (begin + i * kBlock >= width) break;
      const int c = begin + i * kBlock + thread;
      float value = c < width ? s_row[c] : 0;
      if (set.has_norm) value = round_to(is_bf16, value * factor * weights[i]);
      const float other = __shfl_xor_sync(~0u, value, 1);  // of its pair, which a neighbouring lane has
      const int turn = c - rope_begin;
      if (c >= width) continue;
      if (turn >= 0) {
        const float cosine = s_turns[turn / 2], sine = s_turns[pairs + turn / 2];
        value = round_to(is_bf16, turn % 2 == 0 ? rotated_first(value, other, cosine, sine)
                                                : rotated_second(other, value, cosine, sine));
      }
      if (stays) {
        s_out[c] = value;
      } else if (c >= first) {
        set.x.store(base + c, value);
      }
    }
  }
  if (!stays) return;
  if (set.has_hadamard) hadamard_row(s_out, width, set.hadamard_scale, is_bf16, set.is_fp4);
  __syncthreads();
  if (set.slots != nullptr) {
    uint8_t* entry = set.cache.of_row(row).at(slot, set.entries.bytes);
    for (int piece = thread / kWarp; piece < set.pieces; piece += kBlock / kWarp) {
      write_piece({s_out, false}, 0, piece, set.entries, entry);
    }
    return;
  }
  for (int c = thread; c < width; c += kBlock) set.x.store(base + c, s_out[c]);
}

int64_t shared_floats(const ops::NormRope::SetDesc& set) {
  return 2 * set.rope.width + set.rope.rope_dim;
}

bool run_if_many(const ops::NormRope::SetDesc& from, const ops::NormRope::Set& of, device::Queue& queue) {
  if (from.write || of.weight.data != nullptr) return false;
  ManyVectors all{
      .x = values_of(of.x), .out = values_of(of.x), .positions = of.positions, .frequencies = of.frequencies};
  all.num_rows = of.num_rows, all.vectors = static_cast<int>(from.rope.vectors);
  all.width = static_cast<int>(from.rope.width), all.rope_dim = static_cast<int>(from.rope.rope_dim);
  all.is_inverse = from.rope.is_inverse;
  if (from.norm) all.has_norm = true, all.eps = from.norm->eps;
  if (from.hadamard) {
    all.has_hadamard = true, all.is_fp4 = from.hadamard->is_fp4;
    all.hadamard_scale = hadamard_scale(from.hadamard->width);
  }
  return run_many_vectors("norm_rope", all, queue);
}

}  // namespace

bool norm_rope_supports(const ops::NormRope::Desc& desc, std::string& why_not) {
  if (!ops::norm_rope_reference_supports(desc, why_not)) return false;
  for (const ops::NormRope::SetDesc& set : desc.sets) {
    if (set.rope.width % 2 != 0) {
      why_not = "pairs of channels are those of an even width, not of " + std::to_string(set.rope.width);
      return false;
    }
    if (shared_floats(set) * static_cast<int64_t>(sizeof(float)) <= static_cast<int64_t>(kSharedForAll)) continue;
    why_not = "needs twice a vector in 16 KiB of shared memory, not " + std::to_string(set.rope.width) + " values";
    return false;
  }
  return true;
}

void norm_rope(const ops::NormRope::Desc& desc, const ops::NormRope::Args& args, device::Queue& queue) {
  Job job{};
  int64_t num_blocks = 0, most_floats = 0;
  for (size_t i = 0; i < desc.sets.size(); ++i) {
    const ops::NormRope::SetDesc& from = desc.sets[i];
    const ops::NormRope::Set& of = args.sets[i];
    Set& set = job.sets[i];
    set.end = num_blocks;
    if (run_if_many(from, of, queue)) continue;
    num_blocks += of.num_rows * from.rope.vectors;
    most_floats = std::max(most_floats, shared_floats(from));
    set.end = num_blocks;
    set.x = values_of(of.x), set.weight = values_of(of.weight);
    set.positions = of.positions, set.frequencies = of.frequencies;
    set.vectors = static_cast<int>(from.rope.vectors), set.width = static_cast<int>(from.rope.width);
    set.rope_dim = static_cast<int>(from.rope.rope_dim), set.is_inverse = from.rope.is_inverse;
    if (from.norm) set.has_norm = true, set.eps = from.norm->eps;
    if (from.hadamard) {
      set.has_hadamard = true, set.is_fp4 = from.hadamard->is_fp4;
      set.hadamard_scale = hadamard_scale(from.hadamard->width);
    }
    if (from.write) {
      set.slots = of.slots, set.cache = of.cache;
      set.entries = entries_of(from.write->layout);
      set.pieces = static_cast<int>(num_pieces(from.write->layout));
    }
  }
  const auto start = [&](auto threads) {
    launch("norm_rope", queue, norm_rope_kernel<threads.value>, grid_for(num_blocks, 1), threads.value,
           static_cast<size_t>(most_floats) * sizeof(float), job);
  };
  if (num_blocks <= kWideBlocksEach * multiprocessors()) {
    start(std::integral_constant<int, kWideBlock>());
  } else {
    start(std::integral_constant<int, kBlock>());
  }
}

}  // namespace tessera::backends::cuda
