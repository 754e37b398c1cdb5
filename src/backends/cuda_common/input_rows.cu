// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda_common/input_rows.h"

#include "backends/cuda_common/amax.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/values.cuh"
#include "numeric/fp8_block.h"
#include "numeric/nvfp4.h"

namespace tessera::backends::cuda_common {

namespace {

constexpr int kQ8Group = 128;
constexpr int kBlock = 128;

struct Job {
  Values x;
  int64_t width;
  ExpertRows slots;  // experts null: plain rows
  float* out;
  float* factors;
};

__device__ bool is_foreign(const Job& job, int64_t row) {
  if (job.slots.experts == nullptr) return false;
  const int64_t expert = job.slots.experts[row] - job.slots.first_expert;
  return expert < 0 || expert >= job.slots.num_local;
}

// One thread block per row, one thread per group of 128 values.
__global__ void prepare_a8(Job job) {
  wait_for_previous();
  const int64_t row = blockIdx.x, base = row * job.width;
  if (is_foreign(job, row)) return;
  for (int64_t begin = threadIdx.x * kQ8Group; begin < job.width; begin += kBlock * kQ8Group) {
    const int64_t size = job.width - begin < kQ8Group ? job.width - begin : kQ8Group;
    float values[kQ8Group];
    uint8_t codes[kQ8Group], scale;
    for (int64_t i = 0; i < size; ++i) values[i] = job.x[base + begin + i];
    numeric::q8_quantize(values, size, kQ8Group, codes, &scale);
    numeric::q8_dequantize(codes, &scale, size, kQ8Group, job.out + base + begin);
  }
  if (threadIdx.x == 0) job.factors[row] = 1;
}

// One thread block per row, one thread per block of 16 values.
__global__ void prepare_a4(Job job) {
  wait_for_previous();
  const int64_t row = blockIdx.x, base = row * job.width;
  if (is_foreign(job, row)) return;
  float bound = 0;
  if (job.slots.limit > 0) bound = numeric::nvfp4_bounded_activation_scale(job.slots.routing[row], job.slots.limit);
  const float g = activation_scale<kBlock>(job.x, base, job.width, bound);
  for (int64_t begin = threadIdx.x * numeric::kNvfp4Block; begin < job.width; begin += kBlock * numeric::kNvfp4Block) {
    float values[numeric::kNvfp4Block];
    uint8_t codes[numeric::kNvfp4Block / 2], scale;
    for (int i = 0; i < numeric::kNvfp4Block; ++i) values[i] = job.x[base + begin + i];
    numeric::nvfp4_quantize_row(values, numeric::kNvfp4Block, g, codes, &scale);
    numeric::nvfp4_dequantize_row(codes, &scale, numeric::kNvfp4Block, job.out + base + begin);
  }
  if (threadIdx.x == 0) job.factors[row] = g;
}

}  // namespace

void prepare_input_rows(ops::InputMode mode, const TensorView& x, int64_t num_rows, int64_t width,
                        const ExpertRows* slots, float* out, float* factors, const device::Queue& queue) {
  const Job job{values_of(x), width, slots == nullptr ? ExpertRows{} : *slots, out, factors};
  launch("prepare_input_rows", queue, mode == ops::InputMode::kA8 ? prepare_a8 : prepare_a4, grid_for(num_rows, 1),
         kBlock, 0, job);
}

}  // namespace tessera::backends::cuda_common
