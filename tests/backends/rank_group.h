// SPDX-License-Identifier: Apache-2.0
#pragma once
// What tests of rank_experts call it with, and what one rank gives instead.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "numeric/bf16.h"
#include "ops/rank_experts/rank_experts.h"
#include "testing/op_harness.h"

namespace tessera::testing {

// sm90's variant; null: this machine has none.
template <class Op>
const ops::Variant<Op>* hopper_variant() {
  if (!has_backend("sm90")) return nullptr;
  for (const ops::Backend* backend : backends::all_backends()) {
    if (std::string(backend->name) == "sm90") return &backend->variants_of<Op>().front();
  }
  return nullptr;
}

struct GroupShape {
  int world = 2;
  int64_t hidden = 512, inner = 128, num_experts = 8, top_k = 3, max_tokens = 8;
  ops::InputMode input = ops::InputMode::kA16;

  ops::MoeExperts::Desc experts(int64_t first, int64_t num_local) const {
    return {.hidden = hidden,
            .inner = inner,
            .first_expert = first,
            .num_local = num_local,
            .num_experts = num_experts,
            .top_k = top_k,
            .input = input,
            .swiglu_limit = 10};
  }
  ops::RankExperts::Desc of_rank(int rank) const {
    const int64_t num_local = num_experts / world;
    return {.routed = experts(rank * num_local, num_local), .world = world};
  }
};

// The experts' weights, packed, on the host and on the GPU. Of many experts some have the same.
class Weights {
 public:
  Weights(Rng& rng, const GroupShape& shape, device::MemorySpace& memory) {
    constexpr int64_t kDifferent = 16;
    const ops::MoeExperts::Desc desc = shape.experts(0, shape.num_experts);
    for (int64_t e = 0; e < shape.num_experts; ++e) {
      for (size_t i = 0; i < 3; ++i) {
        if (e >= kDifferent) {
          views_[i].push_back(views_[i][static_cast<size_t>(e - kDifferent)]);
          there_[i].push_back(there_[i][static_cast<size_t>(e - kDifferent)]);
          continue;
        }
        const bool is_down = i == 2;
        const RandomWeight weight =
            random_weight(rng, desc.format, is_down ? desc.hidden : desc.inner, is_down ? desc.inner : desc.hidden);
        packed_.push_back(weight_for(*hopper_variant<ops::MoeExperts>(), desc, weight.view));
        const VariantWeight& packed = packed_.back();
        placed_.push_back(packed.data.clone_into(memory)), placed_.push_back(packed.scales.clone_into(memory));
        ops::WeightView there = packed.view;
        there.data = placed_[placed_.size() - 2].data(), there.block_scales = placed_.back().data();
        views_[i].push_back(packed.view), there_[i].push_back(there);
      }
    }
    for (size_t i = 0; i < 3; ++i) {
      arrays_[i] = device::Buffer(there_[i].size() * sizeof(ops::WeightView), memory);
      memory.upload(arrays_[i].data(), there_[i].data(), arrays_[i].size());
    }
  }
  const std::vector<ops::WeightView>* on_host() const { return views_; }
  const ops::WeightView* of(int matrix, int64_t first_expert) const {
    return arrays_[matrix].as<ops::WeightView>() + first_expert;
  }

 private:
  std::vector<VariantWeight> packed_;
  std::vector<device::Buffer> placed_;
  std::vector<ops::WeightView> views_[3], there_[3];  // w1, w3, w2
  device::Buffer arrays_[3];
};

// Tokens' first choices: of one rank's experts; the same one; and some that are no expert's.
enum class Routing { kAny, kOneRank, kOneExpert, kPadded };

struct CallSpec {
  std::vector<int64_t> num_tokens;  // of each rank
  Routing routing = Routing::kAny;
  bool has_shared = true, has_nans = false;
  int64_t most_tokens = 0;
};

inline std::vector<int32_t> random_ids(Rng& rng, const GroupShape& shape, int64_t num_tokens, Routing routing) {
  const int64_t num_local = shape.num_experts / shape.world;
  const auto favoured = static_cast<int64_t>(rng.below(static_cast<uint64_t>(shape.num_experts)));
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < num_tokens; ++t) {
    std::vector<int32_t> all(static_cast<size_t>(shape.num_experts));
    std::iota(all.begin(), all.end(), 0);
    for (size_t i = 0; i + 1 < all.size(); ++i) std::swap(all[i], all[i + rng.below(all.size() - i)]);
    if (routing == Routing::kOneExpert) std::swap(all[0], *std::find(all.begin(), all.end(), favoured));
    if (routing == Routing::kOneRank) {
      std::stable_partition(all.begin(), all.end(), [&](int32_t e) { return e / num_local == favoured / num_local; });
    }
    if (routing == Routing::kPadded) {
      for (int64_t k = 0; k < shape.top_k; ++k) {
        const auto last = static_cast<int32_t>(shape.num_experts);
        const int32_t nobodys[] = {-1, last, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};
        if (t % 3 == 0 || rng.below(3) == 0) all[static_cast<size_t>(k)] = nobodys[rng.below(std::size(nobodys))];
      }
    }
    std::sort(all.begin(), all.begin() + shape.top_k);
    ids.insert(ids.end(), all.begin(), all.begin() + shape.top_k);
  }
  return ids;
}

// A call's arrays of all ranks, those of each behind those of the one before; on the host, and on the GPU.
class CallArrays {
 public:
  CallArrays(Rng& rng, const GroupShape& shape, const CallSpec& spec, std::vector<int32_t> chosen,
             device::MemorySpace& memory)
      : shape_(shape), memory_(memory), ids(std::move(chosen)) {
    for (const int64_t n : spec.num_tokens) first_.push_back(total), total += n;
    x = as_tensor(adversarial(rng, total, shape.hidden), DType::kBF16, {total, shape.hidden});
    shared = as_tensor(adversarial(rng, total, shape.hidden), DType::kBF16, {total, shape.hidden});
    if (spec.has_nans && total > 0) {  // the bits that mean no word, as a whole word and as half of one
      auto* values = x.as<uint16_t>() + rng.below(static_cast<uint64_t>(total)) * static_cast<uint64_t>(shape.hidden);
      values[4] = values[5] = values[7] = 0xFFFF;
    }
    for (size_t i = 0; i < ids.size(); ++i) routing.push_back(rng.below(8) == 0 ? 0 : rng.uniform());
    placed_x_ = x.clone_into(memory), placed_shared_ = shared.clone_into(memory);
    placed_ids_ = device::Buffer(ids.size() * 4, memory), placed_routing_ = device::Buffer(ids.size() * 4, memory);
    memory.upload(placed_ids_.data(), ids.data(), placed_ids_.size());
    memory.upload(placed_routing_.data(), routing.data(), placed_routing_.size());
    out_ = device::Buffer(static_cast<size_t>(total * shape.hidden * 2 + kGuard), memory);
    poison();
  }
  void poison() {
    const std::vector<uint8_t> poison(out_.size(), 0xFF);
    memory_.upload(out_.data(), poison.data(), poison.size());
  }
  // Of a rank, with this many tokens.
  ops::RankExperts::Args args(int rank, int64_t num_tokens, const CallSpec& spec, const Weights& weights) const {
    const int64_t first = first_[static_cast<size_t>(rank)];
    const int64_t first_expert = rank * (shape_.num_experts / shape_.world);
    const auto rows = [&](void* data) {
      return TensorView{
          static_cast<uint16_t*>(data) + first * shape_.hidden, DType::kBF16, {num_tokens, shape_.hidden}};
    };
    ops::RankExperts::Args args;
    args.routed.x = rows(placed_x_.view().data);
    args.routed.experts = placed_ids_.as<int32_t>() + first * shape_.top_k;
    args.routed.routing = placed_routing_.as<float>() + first * shape_.top_k;
    args.routed.w1 = weights.of(0, first_expert), args.routed.w3 = weights.of(1, first_expert);
    args.routed.w2 = weights.of(2, first_expert);
    if (spec.has_shared) args.shared = rows(placed_shared_.view().data);
    args.out = rows(out_.data());
    args.num_tokens = num_tokens, args.most_tokens = spec.most_tokens;
    return args;
  }
  std::vector<float> result() const {
    std::vector<uint16_t> bits(out_.size() / 2);
    memory_.download(bits.data(), out_.data(), out_.size());
    const auto end = bits.begin() + static_cast<std::ptrdiff_t>(total * shape_.hidden);
    EXPECT_EQ(std::count(end, bits.end(), 0xFFFF), bits.end() - end) << "behind the end";
    std::vector<float> values;
    std::for_each(bits.begin(), end, [&](uint16_t value) { values.push_back(numeric::bf16_to_float(value)); });
    return values;
  }

 private:
  static constexpr int64_t kGuard = 256;
  const GroupShape& shape_;
  device::MemorySpace& memory_;
  std::vector<int64_t> first_;
  device::Tensor placed_x_, placed_shared_;
  device::Buffer placed_ids_, placed_routing_, out_;

 public:
  int64_t total = 0;
  std::vector<int32_t> ids;
  std::vector<float> routing;
  device::Tensor x, shared;
};

// One rank with all experts and all tokens: Hopper's moe_experts, then moe_combine.
inline std::vector<float> expected_of(const GroupShape& shape, const CallArrays& call, bool has_shared,
                                      const Weights& weights) {
  const ops::MoeExperts::Desc desc = shape.experts(0, shape.num_experts);
  std::vector<float> slots;
  for_each_variant<ops::MoeExperts>(desc, [&](const ops::Variant<ops::MoeExperts>& variant, bool) {
    if (!is_on_gpu(variant) || std::string(variant.name) != "wgmma" || call.total == 0) return;
    slots = run_experts(variant, desc, {call.x, call.ids, call.routing}, weights.on_host(), 0, call.total, 1);
  });
  const device::Tensor routed = as_tensor(slots, DType::kBF16, {call.total, shape.top_k, shape.hidden});
  PoisonedTensor sum(DType::kBF16, {call.total, shape.hidden});
  device::Queue queue(1);
  ops::moe_combine_reference({.hidden = shape.hidden, .top_k = shape.top_k},
                             {.routed = routed.view(),
                              .shared = has_shared ? call.shared.view() : TensorView{},
                              .out = sum.view(),
                              .num_tokens = call.total},
                             queue);
  return sum.floats();
}

}  // namespace tessera::testing
