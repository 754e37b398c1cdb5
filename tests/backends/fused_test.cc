// SPDX-License-Identifier: Apache-2.0
// Fused ops give the bits of their parts: each variant against the variants of the same backend that a layer would run
// one after the other, on the calls of verify (heavy tails, zeros, denormals, odd sizes).
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>

#include "ops/planner.h"
#include "testing/op_harness.h"
#include "verify/cases.h"

#ifdef TESSERA_CUDA_EMULATED
#include "device/cuda/emulated/capability.h"
#endif

namespace tessera {
namespace {

using ops::Bound;

class FusedTest : public testing::RandomTest {
 protected:
  // Calls test(planner of the backend and of the one that it extends) for each backend that has the op and can run
  // here, or for the one of that name.
  template <class Op, class Test>
  void for_each_backend(const Test& test, const std::string& name = "") {
    for (const ops::Backend* backend : backends::all_backends()) {
      if (!name.empty() && backend->name != name) continue;
      std::string why_not;
      device::Machine machine = device::probe_machine();
      if (backend->is_on_gpu) machine.gpu = testing::find_test_gpu(why_not);
      if (backend->variants_of<Op>().empty() || !ops::is_usable(*backend, machine, why_not)) continue;
      SCOPED_TRACE(backend->name);
      backend_ = backend;
      const ops::Backend* const backends[] = {backend, backend->extends};
      ops::Planner planner(std::span(backends, backend->extends == nullptr ? 1 : 2), machine);
      test(planner);
    }
  }

  // Runs a bound op on arrays of the host.
  template <class Op>
  void run(const Bound<Op>& op, const typename Op::Args& args) {
    if (op.backend->is_on_gpu) {
      for (const std::string& fault : verify::run_staged(testing::gpu_stage_memory(), *op.variant, op.desc, args)) {
        ADD_FAILURE() << fault;
      }
      return;
    }
    typename Op::Args mine = args;
    device::Buffer workspace;
    if constexpr (requires { mine.workspace; }) {
      workspace = device::Buffer(static_cast<size_t>(op.workspace_bytes(64)));
      mine.workspace = workspace.data();
    }
    op.variant->run(op.desc, mine, queue_);
  }

  // For each quick call of the op: `sequence(desc, args, parts)` runs the parts and lists who computed them,
  // `adapt(op, args)` packs the weights of a second, equal call. Outputs must have the same bits.
  template <class Op, class Sequence, class Adapt>
  void compare(ops::Planner& planner, const Sequence& sequence, const Adapt& adapt) {
    int num_compared = 0;
    for (const verify::Spec<Op>& spec : verify::specs_of(Op{}, true)) {
      // An emulated GPU is slow: of the larger calls it gets a few, others in each run.
      if (testing::kGpuIsEmulated && spec.num_tokens > 3 && rng_.below(6) != 0) continue;
      const std::span<const ops::Variant<Op>> variants = backend_->variants_of<Op>();
      std::string why_not;
      if (std::none_of(variants.begin(), variants.end(),
                       [&](const auto& variant) { return variant.supports(spec.desc, why_not); })) {
        continue;
      }
      SCOPED_TRACE(spec.desc.to_string() + ", " + std::to_string(spec.num_tokens) + " rows");
      const uint64_t stream = rng_.next_u64();
      Rng first(seed_, stream), second(seed_, stream);
      verify::Case<Op> one = verify::make_case(first, spec), other = verify::make_case(second, spec);
      std::vector<ops::Chosen> parts;
      sequence(spec.desc, one.args, parts);
      const Bound<Op> fused = planner.bind_fused<Op>("fused", spec.desc, parts);
      if (fused.backend != backend_) continue;
      ++num_compared;
      adapt(fused, other.args);
      run(fused, other.args);
      for (size_t i = 0; i < one.arrays.outputs().size(); ++i) {
        const verify::Output &expected = one.arrays.outputs()[i], &found = other.arrays.outputs()[i];
        if (!expected.is_compared) continue;
        EXPECT_EQ(verify::compare(found.view, expected.view, verify::Rule::kBits, 0).what, "") << expected.name;
      }
    }
    EXPECT_GT(num_compared, 0);
  }

  template <class Op>
  void part(ops::Planner& planner, const typename Op::Desc& desc, const typename Op::Args& args,
            std::vector<ops::Chosen>& parts) {
    const Bound<Op> op = planner.bind<Op>("part", desc);
    parts.push_back(op.chosen());
    run(op, args);
  }

  void compare_linear_groups(const std::string& name = "");

  const ops::Backend* backend_ = nullptr;  // whose fused ops are compared
  device::Queue queue_{2};
};

constexpr auto kNothing = [](const auto&, const auto&) {};

TEST_F(FusedTest, NormRope) {
  for_each_backend<ops::NormRope>([&](ops::Planner& planner) {
    compare<ops::NormRope>(
        planner,
        [&](const ops::NormRope::Desc& desc, const ops::NormRope::Args& args, std::vector<ops::Chosen>& parts) {
          for (size_t i = 0; i < desc.sets.size(); ++i) {
            const ops::NormRope::SetDesc& set = desc.sets[i];
            const ops::NormRope::Set& of = args.sets[i];
            const int64_t num_vectors = of.num_rows * set.rope.vectors;
            if (set.norm) {
              part<ops::RmsNorm>(planner, *set.norm,
                                 {.x = of.x, .weight = of.weight, .out = of.x, .num_rows = num_vectors}, parts);
            }
            part<ops::Rope>(
                planner, set.rope,
                {.x = of.x, .positions = of.positions, .frequencies = of.frequencies, .num_tokens = of.num_rows},
                parts);
            if (set.hadamard) {
              part<ops::Hadamard>(planner, *set.hadamard, {.x = of.x, .num_rows = num_vectors}, parts);
            }
            if (set.write) {
              part<ops::CacheWrite>(planner, *set.write,
                                    {.rows = of.x, .slots = of.slots, .cache = of.cache, .num_rows = of.num_rows},
                                    parts);
            }
          }
        },
        kNothing);
  });
}

TEST_F(FusedTest, PoolNorm) {
  for_each_backend<ops::PoolNorm>([&](ops::Planner& planner) {
    compare<ops::PoolNorm>(
        planner,
        [&](const ops::PoolNorm::Desc& desc, const ops::PoolNorm::Args& args, std::vector<ops::Chosen>& parts) {
          for (size_t i = 0; i < desc.pools.size(); ++i) {
            part<ops::CompressorPool>(planner, desc.pools[i], args.pools[i], parts);
          }
          if (desc.norm) part<ops::RmsNorm>(planner, *desc.norm, args.norm, parts);
        },
        kNothing);
  });
}

TEST_F(FusedTest, AttentionRope) {
  for_each_backend<ops::AttentionRope>([&](ops::Planner& planner) {
    compare<ops::AttentionRope>(
        planner,
        [&](const ops::AttentionRope::Desc& desc, const ops::AttentionRope::Args& args,
            std::vector<ops::Chosen>& parts) {
          part<ops::Attention>(planner, desc.attention, ops::attention_of(args), parts);
          part<ops::Rope>(planner, desc.rope, ops::rope_of(args), parts);
        },
        kNothing);
  });
}

TEST_F(FusedTest, MhcPostPre) {
  for_each_backend<ops::MhcPostPre>([&](ops::Planner& planner) {
    compare<ops::MhcPostPre>(
        planner,
        [&](const ops::MhcPostPre::Desc& desc, const ops::MhcPostPre::Args& args, std::vector<ops::Chosen>& parts) {
          ops::MhcPostPre::Args of = args;
          of.combine.num_tokens = of.post.num_tokens = of.pre.num_tokens = args.num_tokens;
          if (desc.combine) part<ops::MoeCombine>(planner, *desc.combine, of.combine, parts);
          if (desc.has_post) part<ops::MhcPost>(planner, desc.mhc, of.post, parts);
          if (!desc.norm) return;
          part<ops::MhcPre>(planner, desc.mhc, of.pre, parts);
          part<ops::RmsNorm>(planner, *desc.norm,
                             {.x = of.pre.y, .weight = of.weight, .out = of.pre.y, .num_rows = of.num_tokens}, parts);
        },
        kNothing);
  });
}

void FusedTest::compare_linear_groups(const std::string& name) {
  const auto compare_on = [&](ops::Planner& planner) {
    std::deque<verify::VariantWeight> packed;
    compare<ops::LinearGroup>(
        planner,
        [&](const ops::LinearGroup::Desc& desc, const ops::LinearGroup::Args& given, std::vector<ops::Chosen>& parts) {
          ops::LinearGroup::Args args = given;
          device::Buffer normed;
          std::vector<ops::Chosen> norm;
          if (desc.norm) {
            normed = device::Buffer(static_cast<size_t>(args.num_tokens * desc.norm->width) * 4);
            args.workspace = normed.data();
            part<ops::RmsNorm>(planner, *desc.norm, ops::norm_of_group(desc, args), norm);
            args.x = ops::norm_of_group(desc, args).out;
          }
          for (size_t i = 0; i < desc.maps.size(); ++i) {
            const Bound<ops::Linear> op = planner.bind<ops::Linear>("part", desc.maps[i]);
            parts.push_back(op.chosen());
            ops::Linear::Args map = ops::linear_of_group(args, i);
            map.weight = packed.emplace_back(testing::weight_for(*op.variant, op.desc, map.weight)).view;
            run(op, map);
          }
          if (desc.swiglu) part<ops::SwiGlu>(planner, *desc.swiglu, ops::swiglu_of_group(args), parts);
          parts.insert(parts.end(), norm.begin(), norm.end());
        },
        [&](const Bound<ops::LinearGroup>& fused, ops::LinearGroup::Args& args) {
          for (size_t i = 0; i < fused.desc.maps.size(); ++i) {
            args.weights[i] =
                packed.emplace_back(testing::weight_for(*fused.variant, fused.desc, args.weights[i])).view;
          }
        });
  };
  for_each_backend<ops::LinearGroup>(compare_on, name);
}

TEST_F(FusedTest, LinearGroup) {
  compare_linear_groups();
}

TEST_F(FusedTest, AllExperts) {
  std::deque<verify::VariantWeight> packed;
  std::deque<std::vector<ops::WeightView>> views;
  const auto pack = [&](const auto& op, const ops::WeightView& weight) {
    return packed.emplace_back(testing::weight_for(*op.variant, op.desc, weight)).view;
  };
  const auto pack_experts = [&](const auto& op, int64_t num_local, ops::MoeExperts::Args& args) {
    for (const ops::WeightView** weights : {&args.w1, &args.w3, &args.w2}) {
      std::vector<ops::WeightView>& all = views.emplace_back();
      for (int64_t e = 0; e < num_local; ++e) all.push_back(pack(op, (*weights)[e]));
      *weights = all.data();
    }
  };
  for_each_backend<ops::AllExperts>([&](ops::Planner& planner) {
    compare<ops::AllExperts>(
        planner,
        [&](const ops::AllExperts::Desc& desc, const ops::AllExperts::Args& given, std::vector<ops::Chosen>& parts) {
          ops::AllExperts::Args args = ops::with_parts_filled_in(given);
          const Bound<ops::MoeExperts> routed = planner.bind<ops::MoeExperts>("part", desc.routed);
          parts.push_back(routed.chosen());
          pack_experts(routed, desc.routed.num_local, args.routed);
          run(routed, args.routed);
          const auto map = [&](const ops::Linear::Desc& of, ops::Linear::Args its) {
            const Bound<ops::Linear> op = planner.bind<ops::Linear>("part", of);
            parts.push_back(op.chosen());
            its.weight = pack(op, its.weight);
            run(op, its);
          };
          for (size_t i = 0; i < 2; ++i) map(desc.gated.maps[i], ops::linear_of_group(args.gated, i));
          part<ops::SwiGlu>(planner, *desc.gated.swiglu, ops::swiglu_of_group(args.gated), parts);
          map(desc.down, args.down);
        },
        [&](const Bound<ops::AllExperts>& fused, ops::AllExperts::Args& args) {
          pack_experts(fused, fused.desc.routed.num_local, args.routed);
          for (size_t i = 0; i < 2; ++i) args.gated.weights[i] = pack(fused, args.gated.weights[i]);
          args.down.weight = pack(fused, args.down.weight);
        });
  });
}

#ifdef TESSERA_CUDA_EMULATED
// Maps of NVFP4 inputs, behind a norm too.
TEST_F(FusedTest, LinearGroupOnBlackwell) {
  struct Restored {
    ~Restored() { device::emulated::set_compute_capability(9, 0); }
  } const restored;
  device::emulated::set_compute_capability(10, 0);
  compare_linear_groups("sm100");
  device::emulated::set_compute_capability(12, 0);
  compare_linear_groups("sm120");
}

// A norm in front of maps keeps its row in shared memory: the widest row that is taken fits, a wider one is refused.
TEST_F(FusedTest, NormsOnBlackwellFitSharedMemory) {
  struct Restored {
    ~Restored() { device::emulated::set_compute_capability(9, 0); }
  } const restored;
  const auto desc_of = [](int64_t width) {
    return ops::LinearGroup::Desc{
        .maps = {{.in = width, .out = 16, .format = ops::WeightFormat::kNvfp4, .input = ops::InputMode::kA4}},
        .norm = ops::RmsNorm::Desc{.width = width}};
  };
  for (const auto& [major, name] : {std::pair{10, "sm100"}, {12, "sm120"}}) {
    SCOPED_TRACE(name);
    device::emulated::set_compute_capability(major, 0);
    const auto backend = std::ranges::find_if(backends::all_backends(),
                                              [&](const ops::Backend* one) { return std::string(one->name) == name; });
    const ops::Variant<ops::LinearGroup>& variant = (*backend)->variants_of<ops::LinearGroup>()[0];
    int64_t width = 16;
    std::string why_not;
    while (variant.supports(desc_of(width), why_not)) width += 16;
    EXPECT_THAT(why_not, ::testing::HasSubstr("needs rows that fit into a multiprocessor's shared memory"));
    width -= 16;
    EXPECT_GE(width, 7168) << "Pro's";
    const ops::LinearGroup::Desc desc = desc_of(width);
    const testing::RandomWeight weight = testing::random_weight(rng_, ops::WeightFormat::kNvfp4, 16, width);
    const testing::VariantWeight packed = testing::weight_for(variant, desc, weight.view);
    const device::Tensor x = testing::as_tensor(testing::adversarial(rng_, 1, width), DType::kBF16, {1, width});
    const device::Tensor norm =
        testing::as_tensor(std::vector<float>(static_cast<size_t>(width), 1), DType::kBF16, {width});
    testing::PoisonedTensor y(desc.maps[0].output, Shape{1, 16});
    ops::LinearGroup::Args args;
    args.x = x.view(), args.norm_weight = norm.view(), args.num_tokens = 1;
    args.weights[0] = packed.view, args.y[0] = y.view();
    EXPECT_TRUE(verify::run_staged(testing::gpu_stage_memory(), variant, desc, args).empty());
    for (const float value : y.floats()) EXPECT_TRUE(std::isfinite(value));
  }
}
#endif

}  // namespace
}  // namespace tessera
