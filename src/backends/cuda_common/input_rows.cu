// SPDX-License-Identifier: Apache-2.0
// What bounds it: a row's values are loaded twice in a4 where no bound gives its scale, else once.
#include "backends/cuda_common/input_rows.h"

#include "backends/cuda_common/amax.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/rounded_rows.cuh"
#include "backends/cuda_common/values.cuh"

namespace tessera::backends::cuda_common {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / kRowLanes;

struct Job {
  Values x;
  int64_t width;
  ExpertRows slots;  // experts null: plain rows
  Values out;
  float* factors;
};

__device__ bool is_foreign(const Job& job, int64_t row) {
  if (job.slots.experts == nullptr) return false;
  const int64_t expert = job.slots.experts[row] - job.slots.first_expert;
  return expert < 0 || expert >= job.slots.num_local;
}

class PlainRow {
 public:
  __device__ PlainRow(const Job& job, int64_t base) : job_(job), base_(base) {}
  __device__ int64_t width() const { return job_.width; }
  __device__ void load(int64_t column, float (&values)[kLaneColumns]) const {
    if (job_.x.is_bf16 && job_.width % kLaneColumns == 0) {
      uint2 pairs{};
      if (column < job_.width) {
        pairs = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(job_.x.data) + base_ + column);
      }
      values[0] = __uint_as_float(pairs.x << 16), values[1] = __uint_as_float(pairs.x & 0xFFFF0000);
      values[2] = __uint_as_float(pairs.y << 16), values[3] = __uint_as_float(pairs.y & 0xFFFF0000);
      return;
    }
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) values[i] = column + i < job_.width ? job_.x[base_ + column + i] : 0;
  }
  __device__ void store(int64_t column, const float (&values)[kLaneColumns]) const {
    if (job_.out.is_bf16 && job_.width % kLaneColumns == 0) {
      if (column >= job_.width) return;
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(job_.out.data) + base_ + column) = {
          bf16_pair(values[0], values[1]), bf16_pair(values[2], values[3])};
      return;
    }
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      if (column + i < job_.width) job_.out.store(base_ + column + i, values[i]);
    }
  }

 private:
  const Job& job_;
  const int64_t base_;
};

// Grid: rows by parts of their columns (in a4 one).
template <ops::InputMode kMode>
__global__ void __launch_bounds__(kThreads) prepare_rows(Job job) {
  wait_for_previous();
  const int64_t row = blockIdx.x, base = row * job.width;
  if (is_foreign(job, row)) return;
  float g = 1;
  if constexpr (kMode == ops::InputMode::kA4) {
    float bound = 0;
    if (job.slots.limit > 0) bound = numeric::nvfp4_bounded_activation_scale(job.slots.routing[row], job.slots.limit);
    g = activation_scale<kThreads>(job.x, base, job.width, bound);
  }
  const int warp = static_cast<int>(threadIdx.x) / kRowLanes, part = static_cast<int>(blockIdx.y);
  round_row<kMode>(PlainRow(job, base), part * kWarps + warp, static_cast<int>(gridDim.y) * kWarps, g);
  if (threadIdx.x == 0 && part == 0 && job.factors != nullptr) job.factors[row] = g;
}

}  // namespace

void prepare_input_rows(ops::InputMode mode, const TensorView& x, int64_t num_rows, int64_t width,
                        const ExpertRows* slots, const TensorView& out, float* factors, const device::Queue& queue) {
  if (num_rows == 0) return;
  const Job job{values_of(x), width, slots == nullptr ? ExpertRows{} : *slots, values_of(out), factors};
  const bool is_a8 = mode == ops::InputMode::kA8;
  const int64_t parts = is_a8 ? ceil_div<int64_t>(width, kWarps * kWarpColumns) : 1;
  launch("prepare_input_rows", queue, is_a8 ? prepare_rows<ops::InputMode::kA8> : prepare_rows<ops::InputMode::kA4>,
         dim3(static_cast<unsigned>(num_rows), static_cast<unsigned>(parts)), kThreads, 0, job);
}

}  // namespace tessera::backends::cuda_common
