// SPDX-License-Identifier: Apache-2.0
#include "ops/compressor/compressor.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/reference_rows.h"

namespace tessera::ops {

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int64_t kOverlapRatio = 4;

// State of a heavily compressed layer (HCA): [3][width].
struct OnlineState {
  float *max, *sum, *weighted;
};

OnlineState online_state(const CompressorPool::Desc& desc, float* state) {
  return {state, state + desc.width, state + 2 * desc.width};
}

// State of an overlapping layer (CSA): the previous window's first half channels [4][width], the current window's rows
// [4][2 width]; values and scores of each.
struct OverlapState {
  float *previous_values, *previous_scores;  // [4][width]
  float *current_values, *current_scores;    // [4][2 * width]
};

OverlapState overlap_state(const CompressorPool::Desc& desc, float* state) {
  const int64_t half = kOverlapRatio * desc.width;
  return {state, state + half, state + 2 * half, state + 4 * half};
}

void pool_online(const CompressorPool::Desc& desc, const CompressorPool::Args& args, int64_t channel) {
  const OnlineState state = online_state(desc, args.state);
  float max = state.max[channel], sum = state.sum[channel], weighted = state.weighted[channel];
  int64_t entry = 0;
  for (int64_t i = 0; i < args.num_tokens; ++i) {
    const int64_t phase = (args.first_position + i) % desc.ratio;
    const float value = args.values[i * desc.width + channel];
    const float score = args.gates[i * desc.width + channel] + args.ape[phase * desc.width + channel];
    const float top = std::isnan(score) || score > max ? score : max;
    const float keep = std::exp(max - top), add = std::exp(score - top);  // the first token: exp(-inf) = 0
    sum = sum * keep + add;
    weighted = weighted * keep + add * value;
    max = top;
    if (phase + 1 == desc.ratio) {
      const float pooled = weighted / sum;
      store_floats(args.entries, entry++ * desc.width + channel, 1, &pooled);
      max = kNone, sum = 0, weighted = 0;
    }
  }
  state.max[channel] = max, state.sum[channel] = sum, state.weighted[channel] = weighted;
}

// Softmax over the eight rows that one entry sees in this channel, then the weighted sum; rows ascend.
float pool_overlap_entry(const float* scores, const float* values) {
  float max = kNone, sum = 0, weighted = 0;
  for (int row = 0; row < 2 * kOverlapRatio; ++row)
    max = std::isnan(scores[row]) || scores[row] > max ? scores[row] : max;
  for (int row = 0; row < 2 * kOverlapRatio; ++row) {
    const float weight = std::exp(scores[row] - max);
    sum += weight;
    weighted += weight * values[row];
  }
  return weighted / sum;
}

void pool_overlap(const CompressorPool::Desc& desc, const CompressorPool::Args& args, int64_t channel) {
  const OverlapState state = overlap_state(desc, args.state);
  const int64_t width = desc.width, row_width = 2 * width;
  int64_t entry = 0;
  for (int64_t i = 0; i < args.num_tokens; ++i) {
    const int64_t phase = (args.first_position + i) % kOverlapRatio;
    for (const int64_t c : {channel, width + channel}) {
      state.current_values[phase * row_width + c] = args.values[i * row_width + c];
      state.current_scores[phase * row_width + c] = args.gates[i * row_width + c] + args.ape[phase * row_width + c];
    }
    if (phase + 1 < kOverlapRatio) continue;
    float scores[2 * kOverlapRatio], values[2 * kOverlapRatio];
    for (int64_t row = 0; row < kOverlapRatio; ++row) {
      scores[row] = state.previous_scores[row * width + channel];
      values[row] = state.previous_values[row * width + channel];
      scores[kOverlapRatio + row] = state.current_scores[row * row_width + width + channel];
      values[kOverlapRatio + row] = state.current_values[row * row_width + width + channel];
      state.previous_scores[row * width + channel] = state.current_scores[row * row_width + channel];
      state.previous_values[row * width + channel] = state.current_values[row * row_width + channel];
    }
    const float pooled = pool_overlap_entry(scores, values);
    store_floats(args.entries, entry++ * width + channel, 1, &pooled);
  }
}

}  // namespace

std::string CompressorPool::Desc::to_string() const {
  return fmt::format("ratio {} [{}]", ratio, width);
}

void compressor_reset(const CompressorPool::Desc& desc, float* state) {
  std::fill_n(state, desc.state_floats(), 0.0f);
  if (desc.ratio == kOverlapRatio) {
    const OverlapState overlap = overlap_state(desc, state);
    std::fill_n(overlap.previous_scores, kOverlapRatio * desc.width, kNone);
    std::fill_n(overlap.current_scores, kOverlapRatio * 2 * desc.width, kNone);
  } else {
    std::fill_n(online_state(desc, state).max, desc.width, kNone);
  }
}

void compressor_pool_reference(const CompressorPool::Desc& desc, const CompressorPool::Args& args,
                               device::Queue& queue) {
  const int64_t grain = std::max<int64_t>(1, 2048 / std::max<int64_t>(1, args.num_tokens));
  queue.parallel_for(desc.width, grain, [&](int64_t begin, int64_t end) {
    for (int64_t channel = begin; channel < end; ++channel) {
      desc.ratio == kOverlapRatio ? pool_overlap(desc, args, channel) : pool_online(desc, args, channel);
    }
  });
}

}  // namespace tessera::ops
