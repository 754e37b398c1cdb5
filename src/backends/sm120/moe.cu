// SPDX-License-Identifier: Apache-2.0
// moe_experts in a4: slots are grouped by expert (cuda_common/expert_slots.cuh), their inputs rounded to NVFP4 and
// arranged; gate and up are multiplied together and give h in BF16, which is rounded and arranged in turn; then down.
#include "backends/cuda_common/scaled_experts.cuh"
#include "backends/sm120/kernels.h"
#include "backends/sm120/scaled_inputs.cuh"
#include "backends/sm120/scaled_sums.cuh"

namespace tessera::backends::sm120 {

namespace {

using cuda_common::ExpertWork, cuda_common::ScaledExperts;

// What both maps have in common.
struct ExpertMap {
  ScaledExperts job;

  __device__ int num_work() const { return job.groups.totals[1]; }
  __device__ ExpertWork work(int index) const { return job.groups.work[index]; }

 protected:
  __device__ static const char* unit_of(const void* data, int row, int64_t columns) {
    return static_cast<const char*>(data) + WeightUnit::offset(row, 0, columns);
  }
};

struct GateAndUpMap : ExpertMap {
  static constexpr int kMatrices = 2;

  __device__ int width() const { return static_cast<int>(job.hidden); }
  __device__ int rows() const { return static_cast<int>(job.inner); }
  __device__ char* inputs(const ExpertWork& work) const {
    return job.tiles_x + InputUnit::bytes(work.first, job.hidden);
  }
  __device__ const char* unit(const ExpertWork& work, int matrix, int row) const {
    return unit_of(matrix == 0 ? work.data[0] : work.data[1], row, job.hidden);  // no index: it stays in registers
  }
  __device__ InputSource source(const ExpertWork& work, int token) const { return {job.x_of(work, token), 0}; }
  __device__ float* factor(const ExpertWork& work, int token) const { return job.x_factors + work.first + token; }
  __device__ void store(const ExpertWork& work, int row, int token, const float (&sums)[2]) const {
    float value[1];
    job.h_values<1>(work, {sums[0]}, {sums[1]}, {*factor(work, token)}, {job.routing[job.slot_of(work, token)]}, value);
    job.h_of(work, token)[row] = numeric::bf16_from_float(value[0]);
  }
};

struct DownMap : ExpertMap {
  static constexpr int kMatrices = 1;

  __device__ int width() const { return static_cast<int>(job.inner); }
  __device__ int rows() const { return static_cast<int>(job.hidden); }
  __device__ char* inputs(const ExpertWork& work) const {
    return job.tiles_h + InputUnit::bytes(work.first, job.inner);
  }
  __device__ const char* unit(const ExpertWork& work, int, int row) const {
    return unit_of(work.data[2], row, job.inner);
  }
  __device__ InputSource source(const ExpertWork& work, int token) const {
    return {job.h_of(work, token), job.bound_of(work, token)};
  }
  __device__ float* factor(const ExpertWork& work, int token) const { return job.h_factors + work.first + token; }
  __device__ void store(const ExpertWork& work, int row, int token, const float (&sums)[1]) const {
    job.store_out(work, token, row, sums[0]);
  }
};

int64_t take_workspace(const ops::MoeExperts::Desc& desc, int64_t num_slots, int32_t work_slots, void* base,
                       ScaledExperts& job) {
  cuda_common::Workspace workspace(base);
  const int64_t positions = cuda_common::most_positions(desc, num_slots);
  cuda_common::take_slot_groups(desc, num_slots, work_slots, workspace, job.groups);
  job.tiles_x = workspace.take<char>(InputUnit::bytes(positions, desc.hidden));
  job.tiles_h = workspace.take<char>(InputUnit::bytes(positions, desc.inner));
  job.h = workspace.take<uint16_t>(positions * desc.inner);
  job.x_factors = workspace.take<float>(positions);
  job.h_factors = workspace.take<float>(positions);
  return workspace.used();
}

template <class Map>
void launch_map(const char* arrange_name, const char* name, const ops::MoeExperts::Desc& desc, int64_t rows,
                const ScaledExperts& job, device::Queue& queue) {
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
  return cuda_common::scaled_experts_support(desc, why_not);
}

int64_t moe_experts_workspace(const ops::MoeExperts::Desc& desc, int64_t max_tokens) {
  ScaledExperts job{};
  return take_workspace(desc, max_tokens * desc.top_k, InputUnit::kRows, nullptr, job);  // most entries of work
}

void moe_experts(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return;
  ScaledExperts job = cuda_common::scaled_experts(desc, args, expert_tile_slots(desc, args.num_tokens));
  take_workspace(desc, job.num_slots, job.work_slots, args.workspace, job);
  cuda_common::group_slots(job, job.groups, queue);
  launch_map<GateAndUpMap>("arrange_inputs", "gate_and_up", desc, desc.inner, job, queue);
  launch_map<DownMap>("arrange_h", "down", desc, desc.hidden, job, queue);
}

}  // namespace tessera::backends::sm120
