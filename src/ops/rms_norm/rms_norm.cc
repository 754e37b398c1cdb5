// SPDX-License-Identifier: Apache-2.0
#include "ops/rms_norm/rms_norm.h"

#include <fmt/format.h>

#include <cmath>

#include "base/error.h"
#include "ops/reference_rows.h"

namespace tessera::ops {

namespace {

constexpr int64_t kMaxWidth = 32768;

}  // namespace

std::string RmsNorm::Desc::to_string() const {
  return fmt::format("[{}]", width);
}

bool rms_norm_reference_supports(const RmsNorm::Desc& desc, std::string& why_not) {
  if (desc.width <= kMaxWidth) return true;
  why_not = fmt::format("rows of at most {}, not {}", kMaxWidth, desc.width);
  return false;
}

void rms_norm_reference(const RmsNorm::Desc& desc, const RmsNorm::Args& args, device::Queue& queue) {
  queue.parallel_for(args.num_rows, 1 + 8192 / desc.width, [&](int64_t begin, int64_t end) {
    float row[kMaxWidth], weight[kMaxWidth];
    const bool has_weight = args.weight.data != nullptr;
    if (has_weight) load_floats(args.weight, 0, desc.width, weight);
    for (int64_t i = begin; i < end; ++i) {
      load_floats(args.x, i * desc.width, desc.width, row);
      const float mean = sum_of_squares(row, desc.width) / static_cast<float>(desc.width);
      const float factor = 1 / std::sqrt(mean + desc.eps);
      for (int64_t c = 0; c < desc.width; ++c) row[c] = row[c] * factor * (has_weight ? weight[c] : 1.0f);
      store_floats(args.out, i * desc.width, desc.width, row);
    }
  });
}

}  // namespace tessera::ops
