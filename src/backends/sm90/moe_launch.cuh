// SPDX-License-Identifier: Apache-2.0
#pragma once
// Launches of the maps of experts by either kernel.
#include <type_traits>

#include "backends/cuda_common/input_rows.h"
#include "backends/sm90/few_experts.cuh"
#include "backends/sm90/moe_tiles.cuh"
#include "backends/sm90/wide_sums.cuh"

namespace tessera::backends::sm90 {

// Of `rows` rows of each expert, by Tiles of Shape. Job: a MoeJob.
template <class Shape, class Tiles, class Job>
void launch_map(const char* name, const ops::MoeExperts::Desc& desc, int64_t rows, const Job& job,
                const device::Queue& queue) {
  const int64_t most_tiles = most_work(desc, job.num_slots, job.work_slots) * ceil_div<int64_t>(rows, Tiles::kRows);
  if constexpr (std::is_same_v<Shape, Few>) {
    launch_few<Tiles>(name, queue, most_tiles, job);
  } else {
    launch_wide<Tiles>(name, queue, most_tiles, job);
  }
}

// Both maps of grouped slots, of which the last one is Down<Shape>'s. Job: a MoeJob.
template <class Shape, template <class> class Down, class Job>
void launch_maps(const ops::MoeExperts::Desc& desc, const Job& job, device::Queue& queue) {
  // What is rounded between the maps is rounded as a whole.
  const bool is_rounded = cuda_common::needs_input_rows(desc.input);
  if constexpr (std::is_same_v<Shape, Few>) {
    using Whole = OfWholeUnits<Down<Few>>;
    const bool is_whole = desc.inner % cuda_common::PackedNvfp4::kColumns == 0;
    if (!is_rounded && is_whole) return launch_few_experts<Whole>(desc, job, queue);
    if (!is_rounded) return launch_few_experts<Down<Few>>(desc, job, queue);
    compute_h<Few>(desc, job, queue);
    if (is_whole) return launch_map<Few, Whole>("down", desc, desc.hidden, job, queue);
  } else {
    compute_h<Wide>(desc, job, queue);
  }
  launch_map<Shape, Down<Shape>>("down", desc, desc.hidden, job, queue);
}

}  // namespace tessera::backends::sm90
