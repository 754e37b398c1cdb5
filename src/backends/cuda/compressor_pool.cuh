// SPDX-License-Identifier: Apache-2.0
#pragma once
// compressor_pool by thread blocks, of which each has some channels of one entry: what kernels of that op and of a
// fused one (pool_norm) do. An entry reads the tokens of its own window and, where windows overlap, of the one before:
// rows of the chunk, at its beginning what the sequence's state kept. So all entries are pooled side by side, each
// token by token as the contract states it; the block of a slice's first one is also who reads and writes the state,
// and nobody has to wait for that.
#include "backends/cuda_common/values.cuh"
#include "ops/compressor/compressor.h"

namespace tessera::backends::cuda::pooling {

using namespace cuda_common;

constexpr int kWarp = 32, kOverlapRatio = 4;

struct Job {
  const float *values, *gates, *ape;
  ops::SequenceBases<float> state;
  const ops::CompressorSlice* slices;
  int64_t num_slices, width;
  int ratio;
  Values entries;
};

inline Job job_of(const ops::CompressorPool::Desc& desc, const ops::CompressorPool::Args& args) {
  return {args.values,
          args.gates,
          args.ape,
          args.state,
          args.slices,
          args.num_slices,
          desc.width,
          static_cast<int>(desc.ratio),
          values_of(args.entries)};
}

__device__ inline float no_score() {
  return -__builtin_huge_valf();
}

// A NaN is.
__device__ inline bool is_larger(float score, float max) {
  return score != score || score > max;
}

// A window that a slice's tokens touch, the n-th of them.
struct Window {
  ops::CompressorSlice slice;
  int64_t n;
  int64_t completed;  // windows of the slice
  int phase;          // of the slice's first token
};

// The window that has row `entry` of the output; false: nobody. All of a warp takes part.
__device__ inline bool find_window(const Job& job, int ratio, int64_t entry, Window& window) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t first = 0; first < job.num_slices; first += kWarp) {
    bool is_here = false;
    if (first + lane < job.num_slices) {
      const ops::CompressorSlice& slice = job.slices[first + lane];
      const int64_t n = entry - slice.first_entry;
      is_here = n >= 0 && n * ratio < slice.num_rows;  // as many rows as most_completed() says; none of nobody's
    }
    const unsigned here = __ballot_sync(~0u, is_here);
    if (here == 0) continue;
    window.slice = job.slices[first + __popc(~here & (here - 1))];
    window.n = entry - window.slice.first_entry;
    window.phase = static_cast<int>(window.slice.first_position % ratio);
    window.completed = (window.phase + window.slice.num_rows) / ratio;
    return true;
  }
  return false;
}

// Called, not inlined: where a thread has few exponentials most of its time would go into bringing their instructions.
[[gnu::noinline]] __device__ inline float exp_called(float x) {
  return exp_rounded(x);
}

// A softmax as far as its tokens have come.
struct Softmax {
  float max = no_score(), sum = 0, weighted = 0;
};

// Adds the slice's rows [first, end), one after the other. Of the two exponentials of a token, of what the maximum
// gained and of what the score lacks, one is exp(0); so is one for every score but NaN and infinities.
__device__ inline void add_rows(const Job& job, const Window& window, int64_t channel, int64_t first, int64_t end,
                                Softmax& pooled) {
  constexpr int kAhead = 8;  // tokens that are on their way at once
  const float *values = job.values + window.slice.first_row * job.width + channel,
              *gates = job.gates + window.slice.first_row * job.width + channel, *ape = job.ape + channel;
  int phase = static_cast<int>((window.phase + first) % job.ratio);
  for (int64_t begin = first; begin < end; begin += kAhead) {
    float value[kAhead], score[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (begin + i >= end) break;
      value[i] = values[(begin + i) * job.width];
      score[i] = gates[(begin + i) * job.width] + ape[phase * job.width];
      phase = phase + 1 == job.ratio ? 0 : phase + 1;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (begin + i >= end) break;
      const bool is_top = is_larger(score[i], pooled.max);
      const float top = is_top ? score[i] : pooled.max;
      const float one = 1 + (top - top), less = exp_rounded(is_top ? pooled.max - top : score[i] - top);
      const float keep = is_top ? less : one, add = is_top ? one : less;
      pooled.sum = pooled.sum * keep + add;
      pooled.weighted = pooled.weighted * keep + add * value[i];
      pooled.max = top;
    }
  }
}

// Row `entry` of the output, of one channel of the thread's; beside the thread that has the entry another one has the
// window that the slice leaves open (`is_tail`). By a whole thread block. wait(): for the kernel before; slices and
// tables are a step's inputs, which no kernel makes.
template <class Wait>
__device__ void pool_online(const Job& job, int64_t entry, int64_t channel, bool is_tail, const Wait& wait) {
  const int64_t width = job.width;
  Window window;
  const bool is_found = find_window(job, job.ratio, entry, window);
  float* const state_of_place = is_found ? job.state.of_place(window.slice.place) : nullptr;
  wait();
  if (!is_found) return;
  const int64_t num_rows = window.slice.num_rows, n = window.n, completed = window.completed;
  const int64_t begin = n * job.ratio - window.phase;
  const auto store = [&](const Softmax& pooled) {
    job.entries.store(entry * width + channel, n < completed ? pooled.weighted / pooled.sum : 0);
  };
  Softmax pooled;
  if (n > 0) {
    if (is_tail || channel >= width) return;
    if (n < completed) add_rows(job, window, channel, begin, begin + job.ratio, pooled);
    return store(pooled);
  }
  float* state = state_of_place + channel;  // [3][width]: max, sum, weighted sum
  if (channel < width && !is_tail) {
    pooled = {state[0], state[width], state[2 * width]};
    add_rows(job, window, channel, 0, min(begin + job.ratio, num_rows), pooled);
  } else if (channel < width && completed > 0) {
    add_rows(job, window, channel, completed * job.ratio - window.phase, num_rows, pooled);
  }
  __syncthreads();  // the state has been read
  if (channel >= width) return;
  if (!is_tail) store(pooled);
  if (is_tail == (completed > 0)) state[0] = pooled.max, state[width] = pooled.sum, state[2 * width] = pooled.weighted;
}

// What windows of a slice see of a channel: values and scores of the chunk's tokens, of those before from the state.
class OverlapRows {
 public:
  struct Gated {
    float value, score;
  };
  __device__ OverlapRows(const Job& job, const Window& window, float* state, int64_t channel)
      : job_(job), window_(window), channel_(channel) {
    const int64_t half = kOverlapRatio * job.width;
    previous_values_ = state, previous_scores_ = state + half;               // [4][width]
    current_values_ = state + 2 * half, current_scores_ = state + 4 * half;  // [4][2 width]
  }

  // The token of that phase of window n, -1 for the one before the first; of its first or second half of channels.
  __device__ Gated at(int64_t n, int phase, int half) const {
    const int64_t width = job_.width, column = half * width + channel_, i = n * kOverlapRatio + phase - window_.phase;
    const int64_t row = (window_.slice.first_row + i) * 2 * width + column, in_window = phase * 2 * width + column;
    const int64_t in_half = phase * width + channel_;
    // Addresses are chosen, not loads, so that all of an entry's are on their way at once.
    const float* value = i >= 0 ? job_.values + row : n < 0 ? previous_values_ + in_half : current_values_ + in_window;
    const float* score = i >= 0 ? job_.gates + row : n < 0 ? previous_scores_ + in_half : current_scores_ + in_window;
    const float ape = job_.ape[in_window];
    return {*value, i >= 0 ? *score + ape : *score};
  }

  // Window n's entry.
  __device__ float pool(int64_t n) const {
    Gated tokens[2 * kOverlapRatio];
#pragma unroll
    for (int k = 0; k < kOverlapRatio; ++k) tokens[k] = at(n - 1, k, 0), tokens[kOverlapRatio + k] = at(n, k, 1);
    return pool_of(tokens, exp_rounded);
  }

  // The state after a slice of one token that completes nothing.
  __device__ void keep_one() const {
    const Gated first = at(0, window_.phase, 0), second = at(0, window_.phase, 1);
    const int64_t to = window_.phase * 2 * job_.width + channel_;
    current_values_[to] = first.value, current_scores_[to] = first.score;
    current_values_[to + job_.width] = second.value, current_scores_[to + job_.width] = second.score;
  }

  // The state after a slice of one token, the last of its window, and the window's entry. All of the state but this
  // token's is there: loads without a choice, and few instructions.
  __device__ float complete_one() const {
    constexpr int kLast = kOverlapRatio - 1;
    // Rows of the state, one channel of each: values and scores of the window before, then of this one both halves.
    const int width = static_cast<int>(job_.width), half = kOverlapRatio * width;
    float* const state = previous_values_ + channel_;
    const float* const ape = job_.ape + (2 * kLast * width + channel_);
    const int64_t row = window_.slice.first_row * 2 * width + channel_;
    const float *value = job_.values + row, *gate = job_.gates + row;
    Gated tokens[2 * kOverlapRatio], halves[kOverlapRatio];  // of the entry; first halves of this window
#pragma unroll
    for (int k = 0; k < kOverlapRatio; ++k) tokens[k] = {state[k * width], state[k * width + half]};
#pragma unroll
    for (int k = 0; k < kLast; ++k) {
      const float* own = state + 2 * half + 2 * k * width;
      halves[k] = {own[0], own[2 * half]};
      tokens[kOverlapRatio + k] = {own[width], own[2 * half + width]};
    }
    halves[kLast] = {value[0], gate[0] + ape[0]};
    const Gated newest = tokens[kOverlapRatio + kLast] = {value[width], gate[width] + ape[width]};
#pragma unroll
    for (int k = 0; k < kOverlapRatio; ++k)
      state[k * width] = halves[k].value, state[k * width + half] = halves[k].score;
    float* own = state + 2 * half + 2 * kLast * width;
    own[0] = halves[kLast].value, own[2 * half] = halves[kLast].score;
    own[width] = newest.value, own[2 * half + width] = newest.score;
    return pool_of(tokens, exp_called);
  }

  // The state after the slice: of the last completed window the first half of channels, of the last tokens all.
  struct State {
    Gated completed[kOverlapRatio], last[kOverlapRatio][2];
  };
  __device__ State load_state() const {
    State state;
#pragma unroll
    for (int k = 0; k < kOverlapRatio; ++k) {
      if (window_.completed > 0) state.completed[k] = at(window_.completed - 1, k, 0);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (is_there(k)) state.last[k][half] = at(token(k) / kOverlapRatio, phase_of(k), half);
      }
    }
    return state;
  }
  __device__ void store(const State& state) const {
#pragma unroll
    for (int k = 0; k < kOverlapRatio; ++k) {
      if (window_.completed > 0) {
        previous_values_[k * job_.width + channel_] = state.completed[k].value;
        previous_scores_[k * job_.width + channel_] = state.completed[k].score;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!is_there(k)) continue;
        const int64_t at = (phase_of(k) * 2 + half) * job_.width + channel_;
        current_values_[at] = state.last[k][half].value, current_scores_[at] = state.last[k][half].score;
      }
    }
  }

 private:
  template <class Exp>
  __device__ static float pool_of(const Gated (&tokens)[2 * kOverlapRatio], const Exp& exp_of) {
    float max = no_score(), sum = 0, weighted = 0;
#pragma unroll
    for (const Gated& token : tokens) max = is_larger(token.score, max) ? token.score : max;
#pragma unroll
    for (const Gated& token : tokens) {
      const float weight = exp_of(token.score - max);
      sum += weight;
      weighted += weight * token.value;
    }
    return weighted / sum;
  }

  // Of the slice's last tokens the k-th, counted from the beginning of its first window, and whether there is one.
  __device__ int64_t token(int k) const {
    return window_.phase + window_.slice.num_rows - kOverlapRatio + k;
  }
  __device__ int phase_of(int k) const {
    return static_cast<int>(token(k) % kOverlapRatio);
  }
  __device__ bool is_there(int k) const {
    return window_.slice.num_rows - kOverlapRatio + k >= 0;
  }

  const Job& job_;
  const Window& window_;
  const int64_t channel_;
  float *previous_values_, *previous_scores_, *current_values_, *current_scores_;
};

// Row `entry` of the output, of one channel of the thread's. By whole warps; wait() as above.
template <class Wait>
__device__ void pool_overlap(const Job& job, int64_t entry, int64_t channel, const Wait& wait) {
  Window window;
  const bool is_found = find_window(job, kOverlapRatio, entry, window);
  float* const state_of_place = is_found ? job.state.of_place(window.slice.place) : nullptr;
  wait();
  if (!is_found || channel >= job.width) return;
  const OverlapRows rows(job, window, state_of_place, channel);
  const auto value_of = [&](int64_t n) { return n < window.completed ? rows.pool(n) : 0; };
  const auto store = [&](int64_t n, float value) {
    job.entries.store((window.slice.first_entry + n) * job.width + channel, value);
  };
  // The state reaches into the first two entries.
  if (window.n > 1) return store(window.n, value_of(window.n));
  if (window.n == 1) return;
  // One token, as answers are made: few instructions. That of the many below most were passed over cost one that
  // completes nothing 2 us, one that completes a window 7 (docs/performance/hopper.md, "A step kernel by kernel", "Maps
  // of two formats in one launch").
  if (window.slice.num_rows == 1 && window.completed == 0) {
    store(0, 0);
    return rows.keep_one();
  }
  if (window.slice.num_rows == 1) return store(0, rows.complete_one());
  // Loads before all stores, which may change what they read for all the compiler knows: one wait instead of three.
  const OverlapRows::State state = rows.load_state();
  const float first = value_of(0);
  if (window.slice.num_rows > kOverlapRatio) store(1, value_of(1));
  store(0, first);
  rows.store(state);
}

}  // namespace tessera::backends::cuda::pooling
