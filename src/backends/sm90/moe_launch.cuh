// SPDX-License-Identifier: Apache-2.0
#pragma once
// Launches of the maps of experts by either kernel.
#include <type_traits>

#include "backends/cuda_common/input_rows.h"
#include "backends/sm90/few_experts.cuh"
#include "backends/sm90/moe_tiles.cuh"
#include "backends/sm90/wide_sums.cuh"

namespace tessera::backends::sm90 {

// Of `rows` rows of each expert. Job: a MoeJob.
template <class Shape, template <class> class Tiles, class Job>
void launch_map(const char* name, const ops::MoeExperts::Desc& desc, int64_t rows, const Job& job,
                const device::Queue& queue) {
  const int64_t most_tiles =
      most_work(desc, job.num_slots, job.work_slots) * ceil_div<int64_t>(rows, Tiles<Shape>::kRows);
  if constexpr (std::is_same_v<Shape, Few>) {
    launch_few<Tiles<Few>>(name, queue, most_tiles, job);
  } else {
    launch_wide<Tiles<Wide>>(name, queue, most_tiles, job);
  }
}

// Both maps of grouped slots, of which the last one is Down<Shape>'s. Job: a MoeJob.
template <class Shape, template <class> class Down, class Job>
void launch_maps(const ops::MoeExperts::Desc& desc, const Job& job, device::Queue& queue) {
  if constexpr (std::is_same_v<Shape, Few>) {
    // What is rounded between the maps is rounded as a whole.
    if (!cuda_common::needs_input_rows(desc.input)) return launch_few_experts<Down<Few>>(desc, job, queue);
  }
  compute_h<Shape>(desc, job, queue);
  launch_map<Shape, Down>("down", desc, desc.hidden, job, queue);
}

}  // namespace tessera::backends::sm90
