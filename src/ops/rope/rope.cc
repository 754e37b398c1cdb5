// SPDX-License-Identifier: Apache-2.0
#include "ops/rope/rope.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"
#include "ops/reference_rows.h"

namespace tessera::ops {

namespace {

constexpr int64_t kMaxRopeDim = 512;

}  // namespace

std::string Rope::Desc::to_string() const {
  return fmt::format("{} x {}, last {}{}", vectors, width, rope_dim, is_inverse ? ", inverse" : "");
}

std::vector<float> rope_frequencies(int64_t rope_dim, double theta, const Yarn* yarn) {
  const double dim = static_cast<double>(rope_dim);
  double low = 0, high = 0;
  if (yarn != nullptr) {
    // The dimension that turns `turns` times over the original context.
    const auto dimension_of = [&](double turns) {
      return dim * std::log(yarn->original_max_positions / (turns * 2 * std::numbers::pi)) / (2 * std::log(theta));
    };
    low = std::max(std::floor(dimension_of(yarn->beta_fast)), 0.0);
    high = std::min(std::ceil(dimension_of(yarn->beta_slow)), dim - 1);
  }
  std::vector<float> frequencies;
  for (int64_t i = 0; i < rope_dim / 2; ++i) {
    double frequency = std::pow(theta, -2.0 * static_cast<double>(i) / dim);
    if (yarn != nullptr) {
      const double ramp = std::clamp((static_cast<double>(i) - low) / std::max(high - low, 1e-3), 0.0, 1.0);
      frequency = frequency / yarn->factor * ramp + frequency * (1 - ramp);
    }
    frequencies.push_back(static_cast<float>(frequency));
  }
  return frequencies;
}

bool rope_reference_supports(const Rope::Desc& desc, std::string& why_not) {
  if (desc.rope_dim <= kMaxRopeDim) return true;
  why_not = fmt::format("rotary parts of at most {}, not {}", kMaxRopeDim, desc.rope_dim);
  return false;
}

void rope_reference(const Rope::Desc& desc, const Rope::Args& args, device::Queue& queue) {
  const int64_t pairs = desc.rope_dim / 2;
  queue.parallel_for(args.num_tokens, 16, [&](int64_t begin, int64_t end) {
    float cosine[kMaxRopeDim / 2], sine[kMaxRopeDim / 2], x[kMaxRopeDim];
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t i = 0; i < pairs; ++i) {
        const float angle = static_cast<float>(args.positions[t]) * args.frequencies[i];
        cosine[i] = static_cast<float>(std::cos(static_cast<double>(angle)));
        sine[i] = static_cast<float>(std::sin(static_cast<double>(angle))) * (desc.is_inverse ? -1.0f : 1.0f);
      }
      for (int64_t v = 0; v < desc.vectors; ++v) {
        const int64_t offset = (t * desc.vectors + v + 1) * desc.width - desc.rope_dim;
        load_floats(args.x, offset, desc.rope_dim, x);
        for (int64_t i = 0; i < pairs; ++i) {
          const float a = x[2 * i], b = x[2 * i + 1];
          x[2 * i] = a * cosine[i] - b * sine[i];
          x[2 * i + 1] = a * sine[i] + b * cosine[i];
        }
        store_floats(args.x, offset, desc.rope_dim, x);
      }
    }
  });
}

}  // namespace tessera::ops
