// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs every variant of every backend that this machine can run, on the same inputs as the reference.
#include <gtest/gtest.h>

#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "backends/registry.h"
#include "ops/packed_layout.h"
#include "testing/compare.h"
#include "testing/fills.h"

namespace tessera::testing {

// How close a variant's output must be to the reference's (docs/contracts/numerics.md, section 5).
constexpr double kBf16Bound = 4e-3, kF32Bound = 1e-5;

// Calls test(variant, is_reference) for each variant that supports `desc`; says which declined and why.
template <class Op>
void for_each_variant(const typename Op::Desc& desc, const std::function<void(const ops::Variant<Op>&, bool)>& test) {
  const device::Machine machine = device::probe_machine();
  for (const ops::Backend* backend : backends::all_backends()) {
    std::string why_not;
    if (!ops::is_usable(*backend, machine, why_not)) {
      std::printf("%s: %s\n", backend->name, why_not.c_str());
      continue;
    }
    for (const ops::Variant<Op>& variant : backend->template variants_of<Op>()) {
      why_not.clear();
      if ((variant.runs_on != nullptr && !variant.runs_on(machine, why_not)) || !variant.supports(desc, why_not)) {
        std::printf("%s.%s %s: %s\n", backend->name, variant.name, desc.to_string().c_str(), why_not.c_str());
        continue;
      }
      SCOPED_TRACE(std::string(backend->name) + "." + variant.name + " " + Op::kName + " " + desc.to_string());
      test(variant, std::string(backend->name) == "ref");
    }
  }
}

// Scratch for one call.
template <class Op>
device::Buffer workspace_for(const ops::Variant<Op>& variant, const typename Op::Desc& desc, int64_t max_tokens) {
  return device::Buffer(
      variant.workspace_bytes == nullptr ? 0 : static_cast<size_t>(variant.workspace_bytes(desc, max_tokens)));
}

// A weight as a variant wants it: packed where it asks for that.
struct VariantWeight {
  device::Buffer data, scales;
  ops::WeightView view;
};

template <class Op>
VariantWeight weight_for(const ops::Variant<Op>& variant, const typename Op::Desc& desc, const ops::WeightView& view) {
  VariantWeight weight;
  weight.view = view;
  const ops::PackedLayout* layout = variant.packed_layout == nullptr ? nullptr : variant.packed_layout(desc);
  if (layout == nullptr) return weight;
  weight.data = device::Buffer(static_cast<size_t>(layout->data_bytes(view)));
  weight.scales = device::Buffer(static_cast<size_t>(layout->scale_bytes(view)));
  weight.view.data = weight.data.data();
  weight.view.block_scales = weight.scales.data();
  device::Queue queue;
  layout->pack(view, weight.view, queue);
  return weight;
}

// y = W x for rows [first, first + count) of x, into poisoned memory.
inline std::vector<float> run_linear(const ops::Variant<ops::Linear>& variant, const ops::Linear::Desc& desc,
                                     const device::Tensor& x, const ops::WeightView& weight, int64_t first,
                                     int64_t count, int threads) {
  const device::Buffer workspace = workspace_for(variant, desc, count);
  device::Queue queue(threads);
  const int64_t in = desc.groups * desc.in, row_bytes = in * dtype_bits(desc.activation) / 8;
  PoisonedTensor y(desc.output, {count, desc.groups * desc.out});
  variant.run(desc,
              {.x = {x.as<char>() + first * row_bytes, desc.activation, {count, in}},
               .weight = weight,
               .y = y.view(),
               .num_tokens = count,
               .workspace = workspace.data()},
              queue);
  EXPECT_TRUE(y.is_guard_intact());
  return y.floats();
}
inline constexpr ops::Variant<ops::Linear> kScalarLinear = {"scalar", nullptr, nullptr, ops::linear_reference_workspace,
                                                            ops::linear_reference};

// Fresh random data each run; the seed is shown when a test fails.
class RandomTest : public ::testing::Test {
 protected:
  RandomTest()
      : seed_(std::random_device{}()), rng_(seed_), trace_(__FILE__, __LINE__, "seed " + std::to_string(seed_)) {}
  uint64_t seed_;
  Rng rng_;
  ::testing::ScopedTrace trace_;
};

}  // namespace tessera::testing
