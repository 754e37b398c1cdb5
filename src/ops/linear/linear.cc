// SPDX-License-Identifier: Apache-2.0
#include "ops/linear/linear.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "base/integer_math.h"
#include "numeric/bf16.h"
#include "numeric/fp8_block.h"
#include "numeric/nvfp4.h"
#include "ops/reference_rows.h"

namespace tessera::ops {

namespace {

constexpr int64_t kQ8Group = 128;
// Multiply-adds worth waking a thread for.
constexpr int64_t kGrain = 1 << 15;

// The workspace: inputs as the multiply sees them, [tokens, groups * in], then one factor per token and group.
struct Scratch {
  float* x;
  float* factors;
};

Scratch scratch_of(const Linear::Desc& desc, const Linear::Args& args) {
  float* x = static_cast<float*>(args.workspace);
  return {x, x + args.num_tokens * desc.groups * desc.in};
}

}  // namespace

std::string Linear::Desc::to_string() const {
  return fmt::format("{} [{}{}, {}] {}{}", ops::to_string(format), groups > 1 ? fmt::format("{} x ", groups) : "", out,
                     in, ops::to_string(input), output == DType::kF32 && activation != DType::kF32 ? " -> f32" : "");
}

float prepare_input_row(InputMode mode, float* row, int64_t width, float bound) {
  if (mode == InputMode::kA8) {
    uint8_t codes[kMaxLinearIn], scales[kMaxLinearIn / kQ8Group + 1];
    numeric::q8_quantize(row, width, kQ8Group, codes, scales);
    numeric::q8_dequantize(codes, scales, width, kQ8Group, row);
  }
  if (mode != InputMode::kA4) return 1;
  float g = bound;
  if (bound <= 0) {
    float amax = 0;
    for (int64_t k = 0; k < width; ++k) {
      // A NaN stays: it must reach the output.
      amax = std::isnan(row[k]) || std::fabs(row[k]) > amax ? std::fabs(row[k]) : amax;
      if (std::isnan(amax)) break;
    }
    g = numeric::nvfp4_activation_scale(amax);
  }
  uint8_t codes[kMaxLinearIn / 2], scales[kMaxLinearIn / numeric::kNvfp4Block];
  numeric::nvfp4_quantize_row(row, width, g, codes, scales);
  numeric::nvfp4_dequantize_row(codes, scales, width, row);
  return g;
}

void decode_weight_row(const WeightView& weight, int64_t row, float* out) {
  const int64_t cols = weight.cols;
  switch (weight.format) {
    case WeightFormat::kF32:
      std::memcpy(out, static_cast<const float*>(weight.data) + row * cols, static_cast<size_t>(cols) * 4);
      return;
    case WeightFormat::kBf16: {
      const uint16_t* source = static_cast<const uint16_t*>(weight.data) + row * cols;
      for (int64_t k = 0; k < cols; ++k) out[k] = numeric::bf16_to_float(source[k]);
      return;
    }
    case WeightFormat::kFp8Block: {
      const int64_t blocks = ceil_div(cols, kQ8Group);
      numeric::fp8_block_dequantize_row(static_cast<const uint8_t*>(weight.data) + row * cols,
                                        static_cast<const float*>(weight.block_scales) + row / kQ8Group * blocks, cols,
                                        out);
      return;
    }
    case WeightFormat::kNvfp4:
      numeric::nvfp4_dequantize_row(
          static_cast<const uint8_t*>(weight.data) + row * (cols / 2),
          static_cast<const uint8_t*>(weight.block_scales) + row * (cols / numeric::kNvfp4Block), cols, out);
      return;
  }
}

int64_t linear_reference_workspace(const Linear::Desc& desc, int64_t max_tokens) {
  return max_tokens * desc.groups * (desc.in + 1) * static_cast<int64_t>(sizeof(float));
}

bool linear_reference_supports(const Linear::Desc& desc, std::string& why_not) {
  if (desc.in > kMaxLinearIn) {
    why_not = fmt::format("at most {} input features, not {}", kMaxLinearIn, desc.in);
    return false;
  }
  if (desc.format == WeightFormat::kNvfp4 && desc.in % numeric::kNvfp4Block != 0) {
    why_not = fmt::format("NVFP4 needs input features in multiples of {}, not {}", numeric::kNvfp4Block, desc.in);
    return false;
  }
  if (desc.input == InputMode::kA4 && desc.format != WeightFormat::kNvfp4) {
    why_not = "a4 is defined for NVFP4 weights only";
    return false;
  }
  return true;
}

void linear_reference(const Linear::Desc& desc, const Linear::Args& args, device::Queue& queue) {
  const int64_t num_rows = args.num_tokens * desc.groups;  // one per token and group
  const Scratch scratch = scratch_of(desc, args);
  queue.parallel_for(num_rows, std::max<int64_t>(1, kGrain / (4 * desc.in)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* row = scratch.x + i * desc.in;
      load_floats(args.x, i * desc.in, desc.in, row);
      scratch.factors[i] = prepare_input_row(desc.input, row, desc.in, 0) * args.weight.tensor_scale;
    }
  });
  const int64_t grain = std::max<int64_t>(1, kGrain / (desc.in * std::max<int64_t>(1, args.num_tokens)));
  queue.parallel_for(desc.groups * desc.out, grain, [&](int64_t begin, int64_t end) {
    float weight[kMaxLinearIn];
    for (int64_t n = begin; n < end; ++n) {
      const int64_t group = n / desc.out;
      decode_weight_row(args.weight, n, weight);
      for (int64_t t = 0; t < args.num_tokens; ++t) {
        const int64_t i = t * desc.groups + group;
        const float y = dot(scratch.x + i * desc.in, weight, desc.in) * scratch.factors[i];
        store_floats(args.y, t * desc.groups * desc.out + n, 1, &y);
      }
    }
  });
}

}  // namespace tessera::ops
