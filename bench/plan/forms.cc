// SPDX-License-Identifier: Apache-2.0
#include "bench/plan/forms.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/integer_math.h"
#include "bench/plan/families.h"

namespace tessera::bench {

namespace {

PlanShape map_shape(const std::string& name, int64_t out, int64_t in, int64_t groups = 1) {
  PlanShape shape;
  shape.name =
      groups > 1 ? fmt::format("{} [{} x {}, {}]", name, groups, out, in) : fmt::format("{} [{}, {}]", name, out, in);
  shape.map = {.in = in, .out = out, .groups = groups, .format = ops::WeightFormat::kNvfp4};
  return shape;
}

// Of the experts that tokens choose from, those of this GPU.
double local_share(const PlanShape& shape) {
  return static_cast<double>(shape.experts.num_local) / static_cast<double>(shape.experts.all_experts());
}

}  // namespace

std::vector<PlanShape> plan_shapes(const std::string& model, const model::Config& c) {
  std::vector<PlanShape> shapes;
  const auto map = [&](const char* what, int64_t out, int64_t in, int64_t groups = 1) {
    shapes.push_back(map_shape(model + " " + what, out, in, groups));
  };
  map("wq_a", c.q_lora_rank, c.hidden_size);
  map("wq_b", c.num_heads * c.head_dim, c.q_lora_rank);
  map("wkv", c.head_dim, c.hidden_size);
  map("wo_a", c.o_lora_rank, c.group_width(), c.o_groups);
  map("wo_b", c.hidden_size, c.o_groups * c.o_lora_rank);
  map("shared w1", c.expert_inner, c.hidden_size);
  map("shared w2", c.hidden_size, c.expert_inner);
  PlanShape experts;
  experts.name = fmt::format("{} {} experts of [{}, {}] top {}", model, c.num_experts, c.expert_inner, c.hidden_size,
                             c.experts_per_token);
  experts.is_experts = true;
  experts.experts = {.hidden = c.hidden_size,
                     .inner = c.expert_inner,
                     .num_local = c.num_experts,
                     .top_k = c.experts_per_token,
                     .format = ops::WeightFormat::kNvfp4};
  shapes.push_back(experts);
  return shapes;
}

PlanShape square_shape(int64_t size) {
  PlanShape shape = map_shape("square", size, size);
  shape.is_square = true;
  return shape;
}

ExpertLoad expert_load(const PlanShape& shape, int64_t tokens, int64_t tile_slots) {
  // Slots of an expert: binomial.
  const ops::MoeExperts::Desc& desc = shape.experts;
  const auto experts = static_cast<double>(desc.num_local), n = static_cast<double>(tokens);
  const double share = static_cast<double>(desc.top_k) / (experts / local_share(shape));
  ExpertLoad load;
  const auto add = [&](int64_t slots, double probability) {
    if (slots > 0) load.touched += experts * probability;
    load.tiles += experts * probability * static_cast<double>(ceil_div(slots, tile_slots));
  };
  if (share >= 1) {  // every token goes to every expert
    add(tokens, 1);
  } else {
    // From the likeliest number to both sides: at the ends probabilities are smaller than a double can be.
    const auto likeliest = std::min(tokens, static_cast<int64_t>((n + 1) * share));
    const auto m = static_cast<double>(likeliest);
    const double most = std::exp(std::lgamma(n + 1) - std::lgamma(m + 1) - std::lgamma(n - m + 1) +
                                 m * std::log(share) + (n - m) * std::log1p(-share));
    const double odds = share / (1 - share);
    const auto growth = [&](int64_t slots) {  // of the probability, from `slots` to one more
      return static_cast<double>(tokens - slots) / static_cast<double>(slots + 1) * odds;
    };
    double probability = most;
    for (int64_t slots = likeliest; slots <= tokens && probability > 0; probability *= growth(slots), ++slots) {
      add(slots, probability);
    }
    probability = most;
    for (int64_t slots = likeliest - 1; slots >= 0 && probability > 0; --slots) {
      probability /= growth(slots);
      add(slots, probability);
    }
  }
  load.slots_of_tile = n * static_cast<double>(desc.top_k) * local_share(shape) / std::max(1.0, load.tiles);
  return load;
}

double nvfp4_bytes(double values) {
  return values * (0.5 + 1.0 / 16);
}

double weight_bytes(ops::WeightFormat format, double values) {
  switch (format) {
    case ops::WeightFormat::kNvfp4:
      return nvfp4_bytes(values);
    case ops::WeightFormat::kFp8Block:
      return values * (1 + 4.0 / (128 * 128));
    case ops::WeightFormat::kBf16:
      return values * 2;
    case ops::WeightFormat::kF32:
      break;
  }
  return values * 4;
}

double shape_flops(const PlanShape& shape, int64_t tokens) {
  const auto n = static_cast<double>(tokens);
  if (!shape.is_experts) return 2 * n * static_cast<double>(shape.map.groups * shape.map.out * shape.map.in);
  const ops::MoeExperts::Desc& e = shape.experts;
  return 6 * n * static_cast<double>(e.top_k * e.hidden * e.inner) * local_share(shape);
}

double shape_weight_bytes(const PlanShape& shape, int64_t tokens) {
  if (!shape.is_experts) return nvfp4_bytes(static_cast<double>(shape.map.groups * shape.map.out * shape.map.in));
  const ops::MoeExperts::Desc& e = shape.experts;
  return nvfp4_bytes(3.0 * static_cast<double>(e.hidden * e.inner)) * expert_load(shape, tokens, 1).touched;
}

Kernel pass_kernel(const std::string& name, double read_bytes, double written_bytes, const Target& target) {
  // What a step has just written lies in L2, and what it writes; of much more the rest goes to memory.
  constexpr double kMostCached = 100e6;
  Kernel kernel;
  kernel.name = name;
  kernel.tiles = target.multiprocessors;
  const double bytes = read_bytes + written_bytes;
  kernel.requested_bytes = bytes / target.multiprocessors;
  kernel.memory_bytes = std::max(0.0, bytes - kMostCached);
  return kernel;
}

std::vector<Kernel> our_kernels(const PlanShape& shape, int64_t tokens, const Target& target) {
  switch (target.family) {
    case Family::kHopper:
      return hopper_kernels(shape, tokens, target);
    case Family::kTensorMemory:
      return tensor_memory_kernels(shape, tokens, target);
    case Family::kWarpProducts:
      return warp_product_kernels(shape, tokens, target);
  }
  return {};
}

std::vector<Kernel> ideal_kernels(const PlanShape& shape, int64_t tokens, const Target& target, const IdealForm& form) {
  if (target.family == Family::kTensorMemory) return ideal_tensor_memory_kernels(shape, tokens, target, form);
  return {};
}

}  // namespace tessera::bench
