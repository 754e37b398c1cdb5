// SPDX-License-Identifier: Apache-2.0
#pragma once
// Plain loops of NVFP4 maps with NVFP4 inputs (a4): rows of both as whole numbers and scales, and what experts make of
// them, whatever a tensor core's sum of two rows is.
#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <vector>

#include "numeric/bf16.h"
#include "numeric/nvfp4.h"
#include "ops/linear/linear.h"
#include "ops/moe/moe.h"
#include "ops/packed_weight.h"
#include "testing/op_harness.h"

namespace tessera::testing {

// A row of NVFP4 values, padded with zeros to a multiple of 256 columns.
struct ScaledRow {
  std::vector<int8_t> halves;   // codes, as multiples of one half
  std::vector<uint8_t> scales;  // of 16 columns each
  float factor = 1;             // g of an input
};

inline ScaledRow scaled_row(const uint8_t* codes, const uint8_t* scales, int64_t width) {
  ScaledRow row;
  const size_t padded = static_cast<size_t>((width + 255) / 256 * 256);
  row.halves.resize(padded), row.scales.resize(padded / 16);
  for (int64_t k = 0; k < width; ++k) {
    const int code = codes[k / 2] >> (k % 2 * 4) & 15;
    row.halves[static_cast<size_t>(k)] = static_cast<int8_t>(2 * numeric::e2m1_to_float(static_cast<uint8_t>(code)));
  }
  std::copy_n(scales, width / 16, row.scales.begin());
  return row;
}
inline ScaledRow weight_row(const ops::WeightView& weight, int64_t row) {
  return scaled_row(static_cast<const uint8_t*>(weight.data) + row * (weight.cols / 2),
                    static_cast<const uint8_t*>(weight.block_scales) + row * (weight.cols / 16), weight.cols);
}
// Quantised with g = `bound`; where that is 0, by the row's largest magnitude.
inline ScaledRow input_row(std::span<const float> values, float bound) {
  const auto width = static_cast<int64_t>(values.size());
  const float g = bound > 0 ? bound : numeric::nvfp4_activation_scale(numeric::abs_max(values.data(), width));
  std::vector<uint8_t> codes(values.size() / 2), scales(values.size() / 16);
  numeric::nvfp4_quantize_row(values.data(), width, g, codes.data(), scales.data());
  ScaledRow row = scaled_row(codes.data(), scales.data(), width);
  row.factor = g;
  return row;
}
inline ScaledRow input_row(const uint16_t* bf16, int64_t width, float bound) {
  std::vector<float> values;
  for (int64_t k = 0; k < width; ++k) values.push_back(numeric::bf16_to_float(bf16[k]));
  return input_row(values, bound);
}

// Outputs of an a4 map with BF16 inputs and outputs on the test's GPU, every array in memory of its own: on the
// emulated one AddressSanitizer sees their ends.
inline std::vector<uint16_t> run_on_own_arrays(const ops::Variant<ops::Linear>& variant, const ops::Linear::Desc& desc,
                                               const RandomWeight& weight, const device::Tensor& rows, int64_t tokens) {
  device::Executor& gpu = gpu_stage_memory().executor();
  const device::Buffer data = weight.data.clone_into(gpu.memory()), scales = weight.scales.clone_into(gpu.memory());
  ops::WeightView placed = weight.view;
  placed.data = data.data(), placed.block_scales = scales.data();
  const ops::PackedWeight packed =
      ops::pack_weight(verify::layout_for(variant, desc), placed, gpu.queue(), gpu.memory());
  const auto bytes = [&](int64_t width) { return static_cast<size_t>(tokens * width) * 2; };
  const device::Buffer x(bytes(desc.in), gpu.memory()), y(bytes(desc.out), gpu.memory());
  const device::Buffer workspace(static_cast<size_t>(variant.workspace_bytes(desc, tokens)), gpu.memory());
  gpu.memory().upload(x.data(), rows.as<char>(), x.size());
  variant.run(desc,
              {.x = {x.data(), DType::kBF16, {tokens, desc.in}},
               .weight = packed.view,
               .y = {y.data(), DType::kBF16, {tokens, desc.out}},
               .num_tokens = tokens,
               .workspace = workspace.data()},
              gpu.queue());
  std::vector<uint16_t> found(static_cast<size_t>(tokens * desc.out));
  gpu.memory().download(found.data(), y.data(), y.size());
  return found;
}

// What tokens choose.
enum class Routing { kAny, kOneExpert, kNoneOfSome };

// Random weights of all local experts, and tokens that choose two of `num_experts` each; some routing weights are zero.
struct ScaledExpertsCase {
  ops::MoeExperts::Desc desc;
  int64_t num_tokens;
  std::vector<RandomWeight> weights;  // w1, w3, w2 of each expert in turn
  device::Tensor x;
  std::vector<int32_t> ids;
  std::vector<float> routing;

  ScaledExpertsCase(Rng& rng, const ops::MoeExperts::Desc& shape, int64_t tokens, int64_t num_experts, Routing kind)
      : desc(shape),
        num_tokens(tokens),
        x(as_tensor(adversarial(rng, tokens, shape.hidden), DType::kBF16, {tokens, shape.hidden})) {
    for (int64_t i = 0; i < 3 * desc.num_local; ++i) {
      const bool is_down = i % 3 == 2;
      weights.push_back(
          random_weight(rng, desc.format, is_down ? desc.hidden : desc.inner, is_down ? desc.inner : desc.hidden));
      weights.back().view.tensor_scale *= 0.02f;  // so that SwiGLU sees more than its limits
      // Of some experts ups are far beyond them beside gates that are not, of others it is the other way around.
      if (i % 9 == 4 || i % 9 == 6) weights.back().view.tensor_scale *= 100;
    }
    const auto below = [&](int64_t count) { return static_cast<int32_t>(rng.below(static_cast<uint64_t>(count))); };
    for (int64_t t = 0; t < tokens; ++t) {
      const int32_t first =
          kind == Routing::kOneExpert ? static_cast<int32_t>(desc.first_expert) : below(num_experts - 1);
      const int32_t step = kind == Routing::kNoneOfSome ? 2 : 1;
      ids.insert(ids.end(), {first / step * step, static_cast<int32_t>(num_experts) - 1});
      routing.insert(routing.end(), {rng.uniform(), below(9) == 0 ? 0.0f : rng.uniform()});
    }
  }

  // Outputs of every slot, where sum(weight row, input row) is what the products give.
  template <class Sum>
  std::vector<float> expected(const Sum& sum) const;
  // Those that a variant gives for `count` tokens from `first` on.
  std::vector<float> found(const ops::Variant<ops::MoeExperts>& variant, int64_t first, int64_t count) const {
    std::vector<VariantWeight> packed;
    std::vector<ops::WeightView> views[3];
    for (size_t i = 0; i < weights.size(); ++i) {
      packed.push_back(weight_for(variant, desc, weights[i].view));
      views[i % 3].push_back(packed.back().view);
    }
    return run_experts(variant, desc, {x, ids, routing}, views, first, count, 1);
  }
};

template <class Sum>
std::vector<float> ScaledExpertsCase::expected(const Sum& sum) const {
  std::vector<float> outputs(ids.size() * static_cast<size_t>(desc.hidden));
  std::vector<std::vector<ScaledRow>> rows;
  for (const RandomWeight& weight : weights) {
    std::vector<ScaledRow>& all = rows.emplace_back();
    for (int64_t n = 0; n < weight.view.rows; ++n) all.push_back(weight_row(weight.view, n));
  }
  for (size_t slot = 0; slot < ids.size(); ++slot) {
    const int64_t e = ids[slot] - desc.first_expert;
    if (e < 0 || e >= desc.num_local) continue;
    const size_t first = static_cast<size_t>(3 * e);
    const auto map = [&](size_t matrix, size_t row, const ScaledRow& input) {
      return numeric::bf16_round(sum(rows[first + matrix][row], input) *
                                 (input.factor * weights[first + matrix].view.tensor_scale));
    };
    const int64_t token = static_cast<int64_t>(slot) / desc.top_k;
    const ScaledRow input = input_row(x.as<uint16_t>() + token * desc.hidden, desc.hidden, 0);
    std::vector<uint16_t> h;
    for (size_t n = 0; n < static_cast<size_t>(desc.inner); ++n) {
      const float value = ops::swiglu_value(map(0, n, input), map(1, n, input), desc.swiglu_limit);
      h.push_back(numeric::bf16_from_float(value * routing[slot]));
    }
    const float bound =
        desc.swiglu_limit > 0 ? numeric::nvfp4_bounded_activation_scale(routing[slot], desc.swiglu_limit) : 0;
    const ScaledRow middle = input_row(h.data(), desc.inner, bound);
    for (size_t n = 0; n < static_cast<size_t>(desc.hidden); ++n) {
      outputs[slot * static_cast<size_t>(desc.hidden) + n] = map(2, n, middle);
    }
  }
  return outputs;
}

}  // namespace tessera::testing
