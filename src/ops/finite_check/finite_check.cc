// SPDX-License-Identifier: Apache-2.0
#include "ops/finite_check/finite_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace tessera::ops {

std::string FiniteCheck::Desc::to_string() const {
  return fmt::format("[{}]", width);
}

void finite_check_reference(const FiniteCheck::Desc& desc, const FiniteCheck::Args& args, device::Queue& queue) {
  queue.parallel_for(args.num_rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float *first = args.values + row * desc.width, *last = first + desc.width;
      const float* bad = std::find_if_not(first, last, [](float value) { return std::isfinite(value); });
      args.first_bad[row] = bad == last ? -1 : static_cast<int32_t>(bad - first);
    }
  });
}

}  // namespace tessera::ops
