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
  float* state;
  int64_t first_position, num_tokens, ratio, width;
  Values entries;
};

__device__ float no_score() {
  return -__builtin_huge_valf();
}

// The larger score; a NaN stays or wins.
__device__ float larger(float score, float max) {
  return score != score || score > max ? score : max;
}

__global__ void pool_online(Job job) {
  const int64_t channel = item_index(), width = job.width;
  if (channel >= width) return;
  float* state = job.state + channel;  // [3][width]: max, sum, weighted sum
  float max = state[0], sum = state[width], weighted = state[2 * width];
  int64_t entry = 0;
  for (int64_t i = 0; i < job.num_tokens; ++i) {
    const int64_t phase = (job.first_position + i) % job.ratio;
    const float value = job.values[i * width + channel];
    const float score = job.gates[i * width + channel] + job.ape[phase * width + channel];
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
}

__global__ void pool_overlap(Job job) {
  const int64_t channel = item_index(), width = job.width, row_width = 2 * width, half = kOverlapRatio * width;
  if (channel >= width) return;
  float *previous_values = job.state, *previous_scores = job.state + half;               // [4][width]
  float *current_values = job.state + 2 * half, *current_scores = job.state + 4 * half;  // [4][2 width]
  int64_t entry = 0;
  for (int64_t i = 0; i < job.num_tokens; ++i) {
    const int64_t phase = (job.first_position + i) % kOverlapRatio;
    for (int64_t c = channel; c < row_width; c += width) {
      current_values[phase * row_width + c] = job.values[i * row_width + c];
      current_scores[phase * row_width + c] = job.gates[i * row_width + c] + job.ape[phase * row_width + c];
    }
    if (phase + 1 < kOverlapRatio) continue;
    float scores[2 * kOverlapRatio], values[2 * kOverlapRatio];
    for (int64_t row = 0; row < kOverlapRatio; ++row) {
      const int64_t previous = row * width + channel, current = row * row_width + channel;
      scores[row] = previous_scores[previous];
      values[row] = previous_values[previous];
      scores[kOverlapRatio + row] = current_scores[current + width];
      values[kOverlapRatio + row] = current_values[current + width];
      previous_scores[previous] = current_scores[current];
      previous_values[previous] = current_values[current];
    }
    float max = no_score(), sum = 0, weighted = 0;
    for (int row = 0; row < 2 * kOverlapRatio; ++row) max = larger(scores[row], max);
    for (int row = 0; row < 2 * kOverlapRatio; ++row) {
      const float weight = exp_rounded(scores[row] - max);
      sum += weight;
      weighted += weight * values[row];
    }
    job.entries.store(entry++ * width + channel, weighted / sum);
  }
}

}  // namespace

void compressor_pool(const ops::CompressorPool::Desc& desc, const ops::CompressorPool::Args& args,
                     device::Queue& queue) {
  if (args.num_tokens == 0) return;
  const Job job{args.values, args.gates,          args.ape,
                args.state,  args.first_position, args.num_tokens,
                desc.ratio,  desc.width,          values_of(args.entries)};
  launch("compressor_pool", queue, desc.ratio == kOverlapRatio ? pool_overlap : pool_online,
         grid_for(desc.width, kBlock), kBlock, 0, job);
}

}  // namespace tessera::backends::cuda
