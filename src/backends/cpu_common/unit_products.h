// SPDX-License-Identifier: Apache-2.0
#pragma once
// The inner loop of attention's logits and of index scores. Included by kernel files only: all names are local to the
// file.
#include <cstdint>

namespace tessera::backends::cpu_common {

namespace {

// sum[n][v] += units of lanes times unit n, over `steps` steps ascending: kVecs vectors of lanes lie `lane_stride`
// units apart from step to step, the kNum single units, each broadcast, `steps` apart. Inlined, so that sums stay in
// registers.
template <class Math, int kNum, int kVecs>
__attribute__((always_inline)) inline void add_unit_products(typename Math::Vec (&sum)[kNum][kVecs],
                                                             const uint32_t* lanes, int64_t lane_stride,
                                                             const uint32_t* singles, int64_t steps) {
  for (int64_t step = 0; step < steps; ++step) {
    typename Math::Units units[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) units[v] = Math::load_units(lanes + step * lane_stride + v * Math::kLanes);
#pragma GCC unroll 8
    for (int n = 0; n < kNum; ++n) {
      const typename Math::Units single = Math::all_units(singles[n * steps + step]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) sum[n][v] = Math::dot(sum[n][v], units[v], single);
    }
  }
}

}  // namespace

}  // namespace tessera::backends::cpu_common
