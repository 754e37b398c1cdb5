// SPDX-License-Identifier: Apache-2.0
// h of the experts in `a4` and `a8`, between its two maps: rounded where it lies, in the order in which it is
// multiplied.
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/rounded_rows.cuh"
#include "backends/sm90/arranged_inputs.cuh"
#include "backends/sm90/moe_job.cuh"

namespace tessera::backends::sm90 {

namespace {

using namespace cuda_common;

// A row of 8, `blocks` of them `stride` bytes apart.
template <class Layout>
class ArrangedRow {
 public:
  __device__ ArrangedRow(char* blocks, int stride, int row, int64_t width)
      : blocks_(blocks), stride_(stride), row_(row), width_(width) {}
  __device__ int64_t width() const { return width_; }
  __device__ void load(int64_t column, float (&values)[kLaneColumns]) const {
#pragma unroll
    for (int i = 0; i < kLaneColumns; i += 2) {
      const uint32_t pair = *pair_at(column + i);
      values[i] = __uint_as_float(pair << 16), values[i + 1] = __uint_as_float(pair & 0xFFFF0000);
    }
  }
  __device__ void store(int64_t column, const float (&values)[kLaneColumns]) const {
#pragma unroll
    for (int i = 0; i < kLaneColumns; i += 2) *pair_at(column + i) = bf16_pair(values[i], values[i + 1]);
  }

 private:
  __device__ uint32_t* pair_at(int64_t column) const {
    const int at = static_cast<int>(column), block = at / Layout::kColumns;
    return reinterpret_cast<uint32_t*>(blocks_ + static_cast<int64_t>(block) * stride_ +
                                       Layout::offset_of_pair(row_, at % Layout::kColumns));
  }

  char* const blocks_;
  const int stride_, row_;
  const int64_t width_;  // a multiple of what a warp takes at once
};

// Grid: entries of work by 8 slots of theirs, a warp each.
template <ops::InputMode kMode, class Layout>
__global__ void __launch_bounds__(kPositionGroup* kRowLanes) round_slots(MoeJob job) {
  static_assert(Layout::kRows == kPositionGroup);
  wait_for_previous();
  const MoeScratch& s = job.scratch;
  if (static_cast<int32_t>(blockIdx.x) >= s.totals[1]) return;
  const ExpertWork& work = s.work[blockIdx.x];
  const int row = static_cast<int>(threadIdx.x) / kRowLanes;
  const int32_t in_work = static_cast<int32_t>(blockIdx.y) * kPositionGroup + row;
  if (in_work >= work.count) return;
  const ArrangedRow<Layout> h(s.h + Layout::bytes(work.first, job.padded_inner) + blockIdx.y * Layout::kBytes,
                              Layout::stride(work.count), row, job.padded_inner);
  float g = 1;
  if constexpr (kMode == ops::InputMode::kA4) {
    const int32_t position = work.first + in_work;
    g = job.limit > 0 ? numeric::nvfp4_bounded_activation_scale(job.routing[s.slots[position]], job.limit)
                      : numeric::nvfp4_activation_scale(warp_amax(h));
    if (threadIdx.x % kRowLanes == 0) s.h_factors[position] = g;
  }
  round_row<kMode>(h, 0, 1, g);
}

}  // namespace

template <class Layout>
void round_h(const ops::MoeExperts::Desc& desc, const MoeJob& job, device::Queue& queue) {
  const dim3 grid(static_cast<unsigned>(most_work(desc, job.num_slots, job.work_slots)),
                  static_cast<unsigned>(ceil_div(job.work_slots, kPositionGroup)));
  const auto kernel = desc.input == ops::InputMode::kA4 ? round_slots<ops::InputMode::kA4, Layout>
                                                        : round_slots<ops::InputMode::kA8, Layout>;
  launch("round_slots", queue, kernel, grid, kPositionGroup * kRowLanes, 0, job);
}

template void round_h<ProductInputs>(const ops::MoeExperts::Desc&, const MoeJob&, device::Queue&);
template void round_h<LaneInputs>(const ops::MoeExperts::Desc&, const MoeJob&, device::Queue&);

}  // namespace tessera::backends::sm90
