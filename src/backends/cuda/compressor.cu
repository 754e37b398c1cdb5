// SPDX-License-Identifier: Apache-2.0
// compressor_pool: a thread per channel, tokens one by one, as the contract states it.
#include "backends/cuda/kernels.h"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/values.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kBlock = 64;
constexpr int64_t kOverlapRatio = 4;

struct Job {
  const float *values, *gates, *ape;
  ops::SequenceBases<float> state;
  const ops::CompressorSlice* slices;
  int64_t ratio, width;
  Values entries;
};

__device__ float no_score() {
  return -__builtin_huge_valf();
}

// The larger score; a NaN stays or wins.
__device__ float larger(float score, float max) {
  return score != score || score > max ? score : max;
}

// Rows of the slice that no window completes, from `entry` on.
__device__ void clear_rest(const Job& job, const ops::CompressorSlice& slice, int64_t entry, int64_t channel) {
  const int64_t end = slice.first_entry + ops::most_completed(job.ratio, slice.num_rows);
  for (; entry < end; ++entry) job.entries.store(entry * job.width + channel, 0);
}

// Grid of both: channels by slices.
__global__ void pool_online(Job job) {
  wait_for_previous();
  const int64_t channel = item_index(), width = job.width;
  if (channel >= width) return;
  const ops::CompressorSlice slice = job.slices[blockIdx.y];
  if (slice.num_rows == 0) return;                           // fills a recorded batch up: nobody's, without a state
  float* state = job.state.of_place(slice.place) + channel;  // [3][width]: max, sum, weighted sum
  float max = state[0], sum = state[width], weighted = state[2 * width];
  int64_t entry = slice.first_entry;
  for (int64_t i = 0; i < slice.num_rows; ++i) {
    const int64_t row = slice.first_row + i, phase = (slice.first_position + i) % job.ratio;
    const float value = job.values[row * width + channel];
    const float score = job.gates[row * width + channel] + job.ape[phase * width + channel];
    const float top = larger(score, max);
    const float keep = exp_rounded(max - top), add = exp_rounded(score - top);
    sum = sum * keep + add;
    weighted = weighted * keep + add * value;
    max = top;
    if (phase + 1 == job.ratio) {
      job.entries.store(entry++ * width + channel, weighted / sum);
      max = no_score(), sum = 0, weighted = 0;
    }
  }
  state[0] = max, state[width] = sum, state[2 * width] = weighted;
  clear_rest(job, slice, entry, channel);
}

__global__ void pool_overlap(Job job) {
  wait_for_previous();
  const int64_t channel = item_index(), width = job.width, row_width = 2 * width, half = kOverlapRatio * width;
  if (channel >= width) return;
  const ops::CompressorSlice slice = job.slices[blockIdx.y];
  float* state = job.state.of_place(slice.place);
  float *previous_values = state, *previous_scores = state + half;               // [4][width]
  float *current_values = state + 2 * half, *current_scores = state + 4 * half;  // [4][2 width]
  int64_t entry = slice.first_entry;
  for (int64_t i = 0; i < slice.num_rows; ++i) {
    const int64_t row = slice.first_row + i, phase = (slice.first_position + i) % kOverlapRatio;
    for (int64_t c = channel; c < row_width; c += width) {
      current_values[phase * row_width + c] = job.values[row * row_width + c];
      current_scores[phase * row_width + c] = job.gates[row * row_width + c] + job.ape[phase * row_width + c];
    }
    if (phase + 1 < kOverlapRatio) continue;
    float scores[2 * kOverlapRatio], values[2 * kOverlapRatio];
    for (int64_t k = 0; k < kOverlapRatio; ++k) {
      const int64_t previous = k * width + channel, current = k * row_width + channel;
      scores[k] = previous_scores[previous];
      values[k] = previous_values[previous];
      scores[kOverlapRatio + k] = current_scores[current + width];
      values[kOverlapRatio + k] = current_values[current + width];
      previous_scores[previous] = current_scores[current];
      previous_values[previous] = current_values[current];
    }
    float max = no_score(), sum = 0, weighted = 0;
    for (int k = 0; k < 2 * kOverlapRatio; ++k) max = larger(scores[k], max);
    for (int k = 0; k < 2 * kOverlapRatio; ++k) {
      const float weight = exp_rounded(scores[k] - max);
      sum += weight;
      weighted += weight * values[k];
    }
    job.entries.store(entry++ * width + channel, weighted / sum);
  }
  clear_rest(job, slice, entry, channel);
}

}  // namespace

void compressor_pool(const ops::CompressorPool::Desc& desc, const ops::CompressorPool::Args& args,
                     device::Queue& queue) {
  const Job job{args.values, args.gates, args.ape,   args.state,
                args.slices, desc.ratio, desc.width, values_of(args.entries)};
  dim3 grid = grid_for(desc.width, kBlock);
  grid.y = static_cast<unsigned>(args.num_slices);
  launch("compressor_pool", queue, desc.ratio == kOverlapRatio ? pool_overlap : pool_online, grid, kBlock, 0, job);
}

}  // namespace tessera::backends::cuda
