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

// Returns where the next entry would go.
int64_t pool_online(const CompressorPool::Desc& desc, const CompressorPool::Args& args, const CompressorSlice& slice,
                    int64_t channel) {
  const OnlineState state = online_state(desc, args.state.of_place(slice.place));
  float max = state.max[channel], sum = state.sum[channel], weighted = state.weighted[channel];
  int64_t entry = slice.first_entry;
  for (int64_t i = 0; i < slice.num_rows; ++i) {
    const int64_t row = slice.first_row + i, phase = (slice.first_position + i) % desc.ratio;
    const float value = args.values[row * desc.width + channel];
    const float score = args.gates[row * desc.width + channel] + args.ape[phase * desc.width + channel];
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
  return entry;
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

int64_t pool_overlap(const CompressorPool::Desc& desc, const CompressorPool::Args& args, const CompressorSlice& slice,
                     int64_t channel) {
  const OverlapState state = overlap_state(desc, args.state.of_place(slice.place));
  const int64_t width = desc.width, row_width = 2 * width;
  int64_t entry = slice.first_entry;
  for (int64_t i = 0; i < slice.num_rows; ++i) {
    const int64_t row = slice.first_row + i, phase = (slice.first_position + i) % kOverlapRatio;
    for (const int64_t c : {channel, width + channel}) {
      state.current_values[phase * row_width + c] = args.values[row * row_width + c];
      state.current_scores[phase * row_width + c] = args.gates[row * row_width + c] + args.ape[phase * row_width + c];
    }
    if (phase + 1 < kOverlapRatio) continue;
    float scores[2 * kOverlapRatio], values[2 * kOverlapRatio];
    for (int64_t k = 0; k < kOverlapRatio; ++k) {
      scores[k] = state.previous_scores[k * width + channel];
      values[k] = state.previous_values[k * width + channel];
      scores[kOverlapRatio + k] = state.current_scores[k * row_width + width + channel];
      values[kOverlapRatio + k] = state.current_values[k * row_width + width + channel];
      state.previous_scores[k * width + channel] = state.current_scores[k * row_width + channel];
      state.previous_values[k * width + channel] = state.current_values[k * row_width + channel];
    }
    const float pooled = pool_overlap_entry(scores, values);
    store_floats(args.entries, entry++ * width + channel, 1, &pooled);
  }
  return entry;
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
  constexpr int64_t kGrain = 256;
  queue.parallel_for(args.num_slices * desc.width, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const CompressorSlice& slice = args.slices[item / desc.width];
      if (slice.num_rows == 0) continue;
      const int64_t channel = item % desc.width;
      int64_t entry = desc.ratio == kOverlapRatio ? pool_overlap(desc, args, slice, channel)
                                                  : pool_online(desc, args, slice, channel);
      const float nothing = 0;
      for (; entry < slice.first_entry + most_completed(desc.ratio, slice.num_rows); ++entry) {
        store_floats(args.entries, entry * desc.width + channel, 1, &nothing);
      }
    }
  });
}

}  // namespace tessera::ops
