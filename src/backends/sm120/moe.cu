// SPDX-License-Identifier: Apache-2.0
// moe_experts in a4: slots are grouped by expert (cuda_common/expert_slots.cuh), their inputs rounded to NVFP4 and
// arranged; gate and up are multiplied together and give h in BF16, which is rounded and arranged in turn; then down.
#include "backends/cuda_common/expert_slots.cuh"
#include "backends/cuda_common/fast_division.cuh"
#include "backends/cuda_common/values.cuh"
#include "backends/sm120/kernels.h"
#include "backends/sm120/scaled_inputs.cuh"
#include "backends/sm120/scaled_sums.cuh"

namespace tessera::backends::sm120 {

namespace {

using cuda_common::ExpertWork;

struct MoeJob : cuda_common::SlotJob {
  cuda_common::SlotGroups groups;
  const float* routing;  // [slots]
  const uint16_t* x;     // [tokens, hidden]
  uint16_t* h;           // [positions, inner]
  char *scaled_x, *scaled_h;
  float *x_factors, *h_factors;  // [positions]
  int64_t inner;
  float limit;
  cuda_common::FastDivisor token_of;  // of a slot
};

// What both maps have in common.
struct ExpertMap {
  MoeJob job;

  __device__ int num_work() const { return job.groups.totals[1]; }
  __device__ ExpertWork work(int index) const { return job.groups.work[index]; }

 protected:
  __device__ int64_t slot_of(const ExpertWork& work, int token) const { return job.groups.slots[work.first + token]; }
  __device__ static const char* unit_of(const void* data, int row, int64_t columns) {
    return static_cast<const char*>(data) + WeightUnit::offset(row, 0, columns);
  }
};

struct GateAndUpMap : ExpertMap {
  static constexpr int kMatrices = 2;

  __device__ int width() const { return static_cast<int>(job.hidden); }
  __device__ int rows() const { return static_cast<int>(job.inner); }
  __device__ char* inputs(const ExpertWork& work) const {
    return job.scaled_x + InputUnit::bytes(work.first, job.hidden);
  }
  __device__ const char* unit(const ExpertWork& work, int matrix, int row) const {
    return unit_of(matrix == 0 ? work.data[0] : work.data[1], row, job.hidden);  // no index: it stays in registers
  }
  __device__ InputSource source(const ExpertWork& work, int token) const {
    const auto slot = static_cast<uint32_t>(slot_of(work, token));
    return {job.x + static_cast<int64_t>(job.token_of.quotient(slot)) * job.hidden, 0};
  }
  __device__ float* factor(const ExpertWork& work, int token) const { return job.x_factors + work.first + token; }
  __device__ void store(const ExpertWork& work, int row, int token, const float (&sums)[2]) const {
    const float g = *factor(work, token);
    const float gate = cuda_common::round_to(true, sums[0] * (g * work.tensor_scales[0]));
    const float up = cuda_common::round_to(true, sums[1] * (g * work.tensor_scales[1]));
    // BF16 follows: FP32 is enough for exp.
    const float h = cuda_common::swiglu_value(gate, up, job.limit, [](float x) { return expf(x); });
    job.h[(static_cast<int64_t>(work.first) + token) * job.inner + row] =
        numeric::bf16_from_float(h * job.routing[slot_of(work, token)]);
  }
};

struct DownMap : ExpertMap {
  static constexpr int kMatrices = 1;

  __device__ int width() const { return static_cast<int>(job.inner); }
  __device__ int rows() const { return static_cast<int>(job.hidden); }
  __device__ char* inputs(const ExpertWork& work) const {
    return job.scaled_h + InputUnit::bytes(work.first, job.inner);
  }
  __device__ const char* unit(const ExpertWork& work, int, int row) const {
    return unit_of(work.data[2], row, job.inner);
  }
  __device__ InputSource source(const ExpertWork& work, int token) const {
    const float bound =
        job.limit > 0 ? numeric::nvfp4_bounded_activation_scale(job.routing[slot_of(work, token)], job.limit) : 0;
    return {job.h + (static_cast<int64_t>(work.first) + token) * job.inner, bound};
  }
  __device__ float* factor(const ExpertWork& work, int token) const { return job.h_factors + work.first + token; }
  __device__ void store(const ExpertWork& work, int row, int token, const float (&sums)[1]) const {
    job.out[slot_of(work, token) * job.hidden + row] =
        numeric::bf16_from_float(sums[0] * (*factor(work, token) * work.tensor_scales[2]));
  }
};

int64_t take_workspace(const ops::MoeExperts::Desc& desc, int64_t num_slots, int32_t work_slots, void* base,
                       MoeJob& job) {
  cuda_common::Workspace workspace(base);
  const int64_t positions = cuda_common::most_positions(desc, num_slots);
  cuda_common::take_slot_groups(desc, num_slots, work_slots, workspace, job.groups);
  job.scaled_x = workspace.take<char>(InputUnit::bytes(positions, desc.hidden));
  job.scaled_h = workspace.take<char>(InputUnit::bytes(positions, desc.inner));
  job.h = workspace.take<uint16_t>(positions * desc.inner);
  job.x_factors = workspace.take<float>(positions);
  job.h_factors = workspace.take<float>(positions);
  return workspace.used();
}

template <class Map>
void launch_map(const char* arrange_name, const char* name, const ops::MoeExperts::Desc& desc, int64_t rows,
                const MoeJob& job, device::Queue& queue) {
  const Map map{{job}};
  const int64_t most_work = cuda_common::most_work(desc, job.num_slots, job.work_slots);
  launch_arrange(arrange_name, queue, most_work, std::min<int64_t>(job.work_slots, job.num_slots), map);
  if (job.work_slots == Wide::kTokens) {
    launch_wide(name, queue, most_work, rows, map);
  } else if (job.work_slots == Few::kMostTokens) {
    launch_few<Few::kMostTiles>(name, queue, most_work, rows, map);
  } else {
    launch_few<1>(name, queue, most_work, rows, map);
  }
}

}  // namespace

bool moe_experts_supports(const ops::MoeExperts::Desc& desc, std::string& why_not) {
  if (desc.input == ops::InputMode::kA4 && desc.activation == DType::kBF16) {
    return ops::moe_experts_reference_supports(desc, why_not);
  }
  why_not = "inputs are not BF16 rounded to NVFP4 (a4)";
  return false;
}

int64_t moe_experts_workspace(const ops::MoeExperts::Desc& desc, int64_t max_tokens) {
  MoeJob job{};
  return take_workspace(desc, max_tokens * desc.top_k, InputUnit::kRows, nullptr, job);  // most entries of work
}

void moe_experts(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return;
  MoeJob job{};
  job.num_slots = args.num_tokens * desc.top_k;
  job.work_slots = expert_tile_slots(desc, args.num_tokens);
  take_workspace(desc, job.num_slots, job.work_slots, args.workspace, job);
  job.experts = args.experts, job.routing = args.routing;
  job.w1 = args.w1, job.w3 = args.w3, job.w2 = args.w2;
  job.x = static_cast<const uint16_t*>(args.x.data), job.out = static_cast<uint16_t*>(args.out.data);
  job.hidden = desc.hidden, job.inner = desc.inner;
  job.first_expert = desc.first_expert, job.num_local = desc.num_local;
  job.limit = desc.swiglu_limit;
  job.token_of = cuda_common::FastDivisor(static_cast<uint32_t>(desc.top_k));
  cuda_common::group_slots(job, job.groups, queue);
  launch_map<GateAndUpMap>("arrange_inputs", "gate_and_up", desc, desc.inner, job, queue);
  launch_map<DownMap>("arrange_h", "down", desc, desc.hidden, job, queue);
}

}  // namespace tessera::backends::sm120
