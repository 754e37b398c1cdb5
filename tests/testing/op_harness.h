// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs every variant of every backend that this machine can run, on the same inputs as the reference.
#include <gtest/gtest.h>

#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "backends/registry.h"
#include "testing/compare.h"
#include "testing/fills.h"
#include "testing/gpu_stage.h"
#include "testing/seed.h"
#include "verify/run_staged.h"
#include "verify/variant_weight.h"

namespace tessera::testing {

// How close a variant's output must be to the reference's (docs/contracts/numerics.md, section 5).
using verify::kBf16Bound;
using verify::kF32Bound;
using verify::VariantWeight;
using verify::weight_for;

// The GPU's variant that run_on_gpu() calls.
template <class Op>
const ops::Variant<Op>*& staged_variant() {
  static const ops::Variant<Op>* variant = nullptr;
  return variant;
}

// What for_each_variant puts in the place of a GPU's run(): takes arrays in host memory, and any queue.
template <class Op>
void run_on_gpu(const typename Op::Desc& desc, const typename Op::Args& args, device::Queue&) {
  for (const std::string& fault : verify::run_staged(gpu_stage_memory(), *staged_variant<Op>(), desc, args)) {
    ADD_FAILURE() << fault;
  }
}

// Whether the variant, as for_each_variant passes it, computes on a GPU.
template <class Op>
bool is_on_gpu(const ops::Variant<Op>& variant) {
  return variant.run == run_on_gpu<Op>;
}

// Whether it does so on an emulated one.
template <class Op>
bool is_emulated(const ops::Variant<Op>& variant) {
  return kGpuIsEmulated && is_on_gpu(variant);
}

// Calls test(variant, is_reference) for each variant that supports `desc`; says which declined and why. Tests need not
// know where a variant runs: a GPU's copies its arrays there and back.
template <class Op>
void for_each_variant(const typename Op::Desc& desc, const std::function<void(const ops::Variant<Op>&, bool)>& test) {
  const device::Machine cpu = device::probe_machine();
  for (const ops::Backend* backend : backends::all_backends()) {
    std::string why_not;
    device::Machine machine = cpu;
    if (backend->is_on_gpu) {
      machine.gpu = find_test_gpu(why_not);
      if (!machine.gpu.has_value()) {
        std::printf("%s: %s\n", backend->name, why_not.c_str());
        continue;
      }
    }
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
      if (backend->is_on_gpu) {
        staged_variant<Op>() = &variant;
        ops::Variant<Op> staged = variant;
        staged.run = run_on_gpu<Op>;
        test(staged, false);
        continue;
      }
      test(variant, std::string(backend->name) == "ref");
    }
  }
}

// Whether this machine, with the GPU that tests use, has the backend.
inline bool has_backend(const std::string& name) {
  device::Machine machine = device::probe_machine();
  std::string why_not;
  machine.gpu = find_test_gpu(why_not);
  for (const ops::Backend* backend : backends::all_backends()) {
    if (backend->name == name) return ops::is_usable(*backend, machine, why_not);
  }
  return false;
}

// Scratch for one call.
template <class Op>
device::Buffer workspace_for(const ops::Variant<Op>& variant, const typename Op::Desc& desc, int64_t max_tokens) {
  return device::Buffer(
      variant.workspace_bytes == nullptr ? 0 : static_cast<size_t>(variant.workspace_bytes(desc, max_tokens)));
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

// Rows [first, first + count) of x (BF16) through their experts, into poisoned memory; `views` are w1, w3 and w2.
struct ExpertRows {
  const device::Tensor& x;
  const std::vector<int32_t>& ids;
  const std::vector<float>& routing;
};
inline std::vector<float> run_experts(const ops::Variant<ops::MoeExperts>& variant, const ops::MoeExperts::Desc& desc,
                                      const ExpertRows& rows, const std::vector<ops::WeightView>* views, int64_t first,
                                      int64_t count, int threads) {
  const device::Buffer workspace = workspace_for(variant, desc, count);
  device::Queue queue(threads);
  PoisonedTensor out(DType::kBF16, {count, desc.top_k, desc.hidden});
  variant.run(desc,
              {.x = {rows.x.as<uint16_t>() + first * desc.hidden, DType::kBF16, {count, desc.hidden}},
               .experts = rows.ids.data() + first * desc.top_k,
               .routing = rows.routing.data() + first * desc.top_k,
               .w1 = views[0].data(),
               .w3 = views[1].data(),
               .w2 = views[2].data(),
               .out = out.view(),
               .num_tokens = count,
               .workspace = workspace.data()},
              queue);
  EXPECT_TRUE(out.is_guard_intact());
  return out.floats();
}

inline constexpr ops::Variant<ops::Linear> kScalarLinear = {"scalar", nullptr, nullptr, ops::linear_reference_workspace,
                                                            ops::linear_reference};

// Fresh random data each run; the seed is shown when a test fails.
class RandomTest : public ::testing::Test {
 protected:
  RandomTest() : seed_(fresh_seed()), rng_(seed_), trace_(__FILE__, __LINE__, "seed " + std::to_string(seed_)) {
    seed_test_gpu(seed_);
  }
  uint32_t seed_;
  Rng rng_;
  ::testing::ScopedTrace trace_;
};

}  // namespace tessera::testing
