// SPDX-License-Identifier: Apache-2.0
// moe_experts with packed NVFP4 weights. What bounds it: with many tokens to an expert the tensor cores' BF16 products
// (wide_sums.cuh), with few the read of the experts' weights (few_experts.cuh; few_sums.cuh where inputs are
// quantized). A handful of slots are too few tiles for that: ring_experts.cu and the portable kernels share a tile
// among warps.
#include <algorithm>
#include <type_traits>

#include "backends/cuda/kernels.h"
#include "backends/cuda_common/input_rows.h"
#include "backends/sm90/kernels.h"
#include "backends/sm90/moe_launch.cuh"
#include "backends/sm90/ring_maps.h"

namespace tessera::backends::sm90 {

namespace {

template <class Shape>
MoeJob job_of(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args) {
  MoeJob job{};
  job.num_slots = args.num_tokens * desc.top_k;
  layout_moe_scratch(desc, job.num_slots, Shape::kTokens, static_cast<char*>(args.workspace), job.scratch);
  job.experts = args.experts, job.routing = args.routing;
  job.w1 = args.w1, job.w3 = args.w3, job.w2 = args.w2;
  job.x = static_cast<const uint16_t*>(args.x.data), job.out = static_cast<uint16_t*>(args.out.data);
  job.hidden = desc.hidden, job.inner = desc.inner, job.padded_inner = padded_inner(desc);
  job.first_expert = desc.first_expert, job.num_local = desc.num_local;
  job.work_slots = Shape::kTokens, job.work_step = Shape::kTokenStep;
  job.limit = desc.swiglu_limit;
  job.token_of = cuda_common::FastDivisor(static_cast<uint32_t>(desc.top_k));
  return job;
}

template <class Shape>
void run(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue) {
  launch_maps<Shape, DownTiles>(desc, group<Shape>(desc, args, queue), queue);
}

}  // namespace

template <class Shape>
MoeJob group(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue) {
  MoeJob job = job_of<Shape>(desc, args);
  if (cuda_common::needs_input_rows(desc.input)) {
    const TensorView rows{job.scratch.rounded_x, DType::kBF16, args.x.shape};
    cuda_common::prepare_input_rows(desc.input, args.x, args.num_tokens, desc.hidden, nullptr, rows,
                                    job.scratch.x_factors, queue);
    job.x = job.scratch.rounded_x;
  }
  const bool is_few = std::is_same_v<Shape, Few> && job.num_slots <= kMostFewSlots;
  is_few ? group_few_slots(desc, job, queue) : group_many_slots<typename Shape::Inputs>(desc, job, queue);
  return job;
}

template <class Shape>
void compute_h(const ops::MoeExperts::Desc& desc, const MoeJob& job, device::Queue& queue) {
  launch_map<Shape, GateAndUpTiles<Shape>>("gate_and_up", desc, desc.inner, job, queue);
  if (cuda_common::needs_input_rows(desc.input)) round_h<typename Shape::Inputs>(desc, job, queue);
}

template MoeJob group<Few>(const ops::MoeExperts::Desc&, const ops::MoeExperts::Args&, device::Queue&);
template MoeJob group<Wide>(const ops::MoeExperts::Desc&, const ops::MoeExperts::Args&, device::Queue&);
template void compute_h<Few>(const ops::MoeExperts::Desc&, const MoeJob&, device::Queue&);
template void compute_h<Wide>(const ops::MoeExperts::Desc&, const MoeJob&, device::Queue&);

bool moe_experts_supports(const ops::MoeExperts::Desc& desc, std::string& why_not) {
  if (desc.format == ops::WeightFormat::kNvfp4) return cuda::moe_experts_packed_supports(desc, why_not);
  why_not = "weights are not NVFP4";
  return false;
}

int64_t moe_experts_workspace(const ops::MoeExperts::Desc& desc, int64_t max_tokens) {
  const int64_t num_slots = max_tokens * desc.top_k;
  return std::max({moe_scratch_bytes<Wide>(desc, num_slots), moe_scratch_bytes<Few>(desc, num_slots),
                   cuda::moe_experts_workspace(desc, max_tokens)});
}

void moe_experts(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return;
  const int64_t multiprocessors = cuda_common::multiprocessors();
  switch (expert_kernels(desc, args.num_tokens, multiprocessors)) {
    case ExpertKernels::kPortable:
      if (uses_ring(desc, args.num_tokens, multiprocessors)) return moe_experts_ring(desc, args, queue);
      return cuda::moe_experts_packed(desc, args, queue);
    case ExpertKernels::kFew:
      return run<Few>(desc, args, queue);
    case ExpertKernels::kWide:
      return run<Wide>(desc, args, queue);
  }
}

}  // namespace tessera::backends::sm90
