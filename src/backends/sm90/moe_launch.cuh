// SPDX-License-Identifier: Apache-2.0
#pragma once
// Launches of a map of experts by either kernel.
#include <type_traits>

#include "backends/sm90/few_sums.cuh"
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

}  // namespace tessera::backends::sm90
