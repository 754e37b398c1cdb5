// SPDX-License-Identifier: Apache-2.0
#include "ops/moe/moe.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "ops/reference_rows.h"

namespace tessera::ops {

namespace {

constexpr int64_t kBlock = 256;  // values handled at a time, on the stack

}  // namespace

std::string SwiGlu::Desc::to_string() const {
  return fmt::format("[{}] limit {}", inner, limit);
}
std::string MoeCombine::Desc::to_string() const {
  return fmt::format("[{}] top {}", hidden, top_k);
}

float swiglu_value(float gate, float up, float limit) {
  if (limit > 0) {
    // Written so that a NaN passes through.
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
  }
  return gate / (1 + std::exp(-gate)) * up;
}

void swiglu_reference(const SwiGlu::Desc& desc, const SwiGlu::Args& args, device::Queue& queue) {
  queue.parallel_for(args.num_tokens * desc.inner, 4096, [&](int64_t begin, int64_t end) {
    float gate[kBlock], up[kBlock];
    for (int64_t i = begin; i < end; i += kBlock) {
      const int64_t count = std::min(kBlock, end - i);
      load_floats(args.gate, i, count, gate);
      load_floats(args.up, i, count, up);
      for (int64_t j = 0; j < count; ++j) gate[j] = swiglu_value(gate[j], up[j], desc.limit);
      store_floats(args.out, i, count, gate);
    }
  });
}

void moe_combine_reference(const MoeCombine::Desc& desc, const MoeCombine::Args& args, device::Queue& queue) {
  queue.parallel_for(args.num_tokens, 16, [&](int64_t begin, int64_t end) {
    float sum[kBlock], term[kBlock];
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t i = 0; i < desc.hidden; i += kBlock) {
        const int64_t count = std::min(kBlock, desc.hidden - i);
        std::fill_n(sum, count, 0.0f);
        const auto add = [&](const TensorView& source, int64_t row) {
          load_floats(source, row * desc.hidden + i, count, term);
          for (int64_t j = 0; j < count; ++j) sum[j] += term[j];
        };
        if (args.routed.data != nullptr) {
          for (int64_t slot = 0; slot < desc.top_k; ++slot) add(args.routed, t * desc.top_k + slot);
        }
        if (args.shared.data != nullptr) add(args.shared, t);
        store_floats(args.out, t * desc.hidden + i, count, sum);
      }
    }
  });
}

}  // namespace tessera::ops
