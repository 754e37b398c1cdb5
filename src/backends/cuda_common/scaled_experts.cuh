// SPDX-License-Identifier: Apache-2.0
#pragma once
// What kernels of moe_experts in a4 (docs/contracts/numerics.md, section 3) have in common, whatever multiplies: slots
// are grouped by expert (expert_slots.cuh), their inputs rounded to NVFP4 and arranged, gate and up give h, which is
// rounded and arranged in turn, and down gives a slot's output.
#include <cstdint>

#include "backends/cuda_common/expert_slots.cuh"
#include "backends/cuda_common/fast_division.cuh"
#include "backends/cuda_common/ptx/conversions.cuh"
#include "backends/cuda_common/ptx/mma.cuh"
#include "backends/cuda_common/swiglu_values.cuh"
#include "backends/cuda_common/values.cuh"
#include "numeric/bf16.h"
#include "numeric/nvfp4.h"

namespace tessera::backends::cuda_common {

struct ScaledExperts : SlotJob {
  SlotGroups groups;
  const float* routing;  // [slots]
  const uint16_t* x;     // [tokens, hidden]
  int64_t inner;
  float limit;  // of SwiGLU; 0: none
  FastDivisor top_k;
  char *tiles_x, *tiles_h;       // the workspace: inputs of both maps in the order of the backend's products
  float *x_factors, *h_factors;  // [positions] g
  uint16_t* h;                   // [positions, inner]

  // Of a token of some work.
  __device__ int64_t slot_of(const ExpertWork& work, int token) const { return groups.slots[work.first + token]; }
  __device__ const uint16_t* x_of(const ExpertWork& work, int token) const {
    const auto slot = static_cast<uint32_t>(slot_of(work, token));
    return x + static_cast<int64_t>(top_k.quotient(slot)) * hidden;
  }
  __device__ uint16_t* h_of(const ExpertWork& work, int token) const {
    return h + (int64_t{work.first} + token) * inner;
  }
  // g of h by the clamp's bound; 0: it has none.
  __device__ float bound_of(const ExpertWork& work, int token) const {
    return limit > 0 ? numeric::nvfp4_bounded_activation_scale(routing[slot_of(work, token)], limit) : 0;
  }
  // Values of h of one row, not yet BF16, from sums of gate and up; `factors` are g of x, `weights` the routing's.
  template <int kCount>
  __device__ void h_values(const ExpertWork& work, const float (&gates)[kCount], const float (&ups)[kCount],
                           const float (&factors)[kCount], const float (&weights)[kCount],
                           float (&values)[kCount]) const {
    uint32_t both[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      both[j] = ptx::round_to_bf16x2(gates[j] * (factors[j] * work.tensor_scales[0]),
                                     ups[j] * (factors[j] * work.tensor_scales[1]));
    }
    swiglu_values(both, weights, limit, values);
  }
  // A row of a token's output, from its sum.
  __device__ void store_out(const ExpertWork& work, int token, int64_t row, float sum) const {
    out[slot_of(work, token) * hidden + row] =
        numeric::bf16_from_float(sum * (h_factors[work.first + token] * work.tensor_scales[2]));
  }
};

// All but the workspace.
inline ScaledExperts scaled_experts(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args,
                                    int32_t work_slots) {
  ScaledExperts job{};
  job.num_slots = args.num_tokens * desc.top_k;
  job.work_slots = work_slots;
  job.experts = args.experts, job.routing = args.routing;
  job.w1 = args.w1, job.w3 = args.w3, job.w2 = args.w2;
  job.x = static_cast<const uint16_t*>(args.x.data), job.out = static_cast<uint16_t*>(args.out.data);
  job.hidden = desc.hidden, job.inner = desc.inner;
  job.first_expert = desc.first_expert, job.num_local = desc.num_local;
  job.limit = desc.swiglu_limit;
  job.top_k = FastDivisor(static_cast<uint32_t>(desc.top_k));
  return job;
}

// Whether experts are for such kernels.
inline bool scaled_experts_support(const ops::MoeExperts::Desc& desc, std::string& why_not) {
  if (desc.input == ops::InputMode::kA4 && desc.activation == DType::kBF16) {
    return ops::moe_experts_reference_supports(desc, why_not);
  }
  why_not = "inputs are not BF16 rounded to NVFP4 (a4)";
  return false;
}

}  // namespace tessera::backends::cuda_common
