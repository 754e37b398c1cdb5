// SPDX-License-Identifier: Apache-2.0
#include <optional>

#include "bindings/c/bound_linear.h"
#include "bindings/c/placed_experts.h"

using namespace tessera;
using namespace tessera::bindings;

namespace {

// Router and shared expert: what makes a mixture of the routed experts.
struct Mixture {
  BoundLinear router_map;
  ops::Bound<ops::Router> router;
  const float* bias = nullptr;
  const int32_t* hash_table = nullptr;
  bool has_shared = false;
  BoundLinear shared_w1, shared_w3, shared_w2;
  ops::Bound<ops::SwiGlu> swiglu;
  device::Buffer logits, experts, routing, routed, gate, up, shared;  // of the most tokens
};

}  // namespace

struct tessera_moe {
  tessera_context* context;
  int64_t max_tokens;
  ops::Bound<ops::MoeExperts> op;
  ops::Bound<ops::MoeCombine> combine;
  std::string kernel;
  PlacedExperts weights;
  device::Buffer workspace;
  std::optional<Mixture> mixture;  // where a router was given

  void run_experts(const TensorView& x, const int32_t* experts, const float* routing, void* out) const {
    const int64_t num_tokens = x.shape[0];
    op.run({.x = x,
            .experts = experts,
            .routing = routing,
            .w1 = weights.w1(),
            .w3 = weights.w3(),
            .w2 = weights.w2(),
            .out = {out, op.desc.activation, {num_tokens, op.desc.top_k, op.desc.hidden}},
            .num_tokens = num_tokens,
            .workspace = workspace.data()},
           context->queue());
  }

  // shared: NULL for none.
  void run_combine(void* routed, void* shared, void* out, int64_t num_tokens) const {
    const ops::MoeCombine::Desc& desc = combine.desc;
    combine.run({.routed = {routed, desc.activation, {num_tokens, desc.top_k, desc.hidden}},
                 .shared = {shared, desc.activation, {num_tokens, desc.hidden}},
                 .out = {out, desc.activation, {num_tokens, desc.hidden}},
                 .num_tokens = num_tokens},
                context->queue());
  }
};

namespace {

void check_desc(const tessera_moe_desc& desc) {
  check_size(desc.hidden, 1, ops::kMaxLinearIn, "desc.hidden");
  check_size(desc.inner, 1, ops::kMaxLinearIn, "desc.inner");
  check_size(desc.num_experts, 1, 65536, "desc.num_experts");
  check_size(desc.num_local, 1, desc.num_experts, "desc.num_local");
  check_size(desc.first_expert, 0, desc.num_experts - desc.num_local, "desc.first_expert");
  check_size(desc.top_k, 1, desc.num_experts, "desc.top_k");
  check_flag(desc.is_normalized == 0 || desc.is_normalized == 1, "desc.is_normalized", "0 or 1", desc.is_normalized);
  if (!(desc.swiglu_limit >= 0)) fail(ErrorCode::kInvalidArgument, "desc.swiglu_limit: expected at least 0");
}

void add_mixture(tessera_moe& moe, const tessera_moe_desc& desc, const tessera_moe_weights& weights) {
  const tessera_context& context = *moe.context;
  const DType activation = moe.op.desc.activation;
  const bool is_f32 = activation == DType::kF32;
  Mixture& mixture = moe.mixture.emplace();
  const ops::WeightView router = weight_of(weights.router, desc.num_experts, desc.hidden, "weights.router");
  check_flag(router.block_scales == nullptr, "weights.router.format", "TESSERA_WEIGHT_F32 or TESSERA_WEIGHT_BF16",
             weights.router->format);
  if ((weights.router_bias == nullptr) == (weights.hash_table == nullptr)) {
    fail(ErrorCode::kInvalidArgument, "weights: expected one of router_bias and hash_table");
  }
  mixture.bias = weights.router_bias, mixture.hash_table = weights.hash_table;
  mixture.router_map = BoundLinear(context,
                                   {.in = desc.hidden,
                                    .out = desc.num_experts,
                                    .format = router.format,
                                    .input = is_f32 ? ops::InputMode::kF32 : ops::InputMode::kA16,
                                    .activation = activation,
                                    .output = DType::kF32},
                                   router, moe.max_tokens);
  ops::Planner planner = context.planner();
  mixture.router = planner.bind<ops::Router>("router", {.num_experts = desc.num_experts,
                                                        .top_k = desc.top_k,
                                                        .is_hashed = mixture.hash_table != nullptr,
                                                        .is_normalized = desc.is_normalized == 1,
                                                        .scaling = desc.routing_scale});
  mixture.has_shared = weights.shared_w1 != nullptr || weights.shared_w3 != nullptr || weights.shared_w2 != nullptr;
  if (mixture.has_shared) {
    const ops::InputMode input = input_mode_of(desc.shared_input, "desc.shared_input");
    activation_of(desc.activation, input);
    const auto bind = [&](const tessera_weight* weight, int64_t out, int64_t in, const char* name) {
      const ops::WeightView view = weight_of(weight, out, in, name);
      const ops::Linear::Desc map{
          .in = in, .out = out, .format = view.format, .input = input, .activation = activation, .output = activation};
      return BoundLinear(context, map, view, moe.max_tokens);
    };
    mixture.shared_w1 = bind(weights.shared_w1, desc.inner, desc.hidden, "weights.shared_w1");
    mixture.shared_w3 = bind(weights.shared_w3, desc.inner, desc.hidden, "weights.shared_w3");
    mixture.shared_w2 = bind(weights.shared_w2, desc.hidden, desc.inner, "weights.shared_w2");
    mixture.swiglu = planner.bind<ops::SwiGlu>(
        "shared swiglu", {.inner = desc.inner, .limit = desc.swiglu_limit, .activation = activation});
  }
  const auto scratch = [&](int64_t values, DType dtype) {
    return device::Buffer(static_cast<size_t>(moe.max_tokens * values * dtype_bits(dtype) / 8), context.memory());
  };
  mixture.logits = scratch(desc.num_experts, DType::kF32);
  mixture.experts = scratch(desc.top_k, DType::kI32);
  mixture.routing = scratch(desc.top_k, DType::kF32);
  mixture.routed = scratch(desc.top_k * desc.hidden, activation);
  mixture.gate = scratch(desc.inner, activation), mixture.up = scratch(desc.inner, activation);
  mixture.shared = scratch(desc.hidden, activation);
}

// x -> the shared expert's output, in mixture.shared.
void run_shared(const tessera_context& context, const Mixture& mixture, void* x, int64_t num_tokens) {
  const ops::SwiGlu::Desc& desc = mixture.swiglu.desc;
  const Shape shape = {num_tokens, desc.inner};
  mixture.shared_w1.run(context, x, mixture.gate.data(), num_tokens);
  mixture.shared_w3.run(context, x, mixture.up.data(), num_tokens);
  const TensorView gate{mixture.gate.data(), desc.activation, shape};
  const TensorView up{mixture.up.data(), desc.activation, shape};
  mixture.swiglu.run({.gate = gate, .up = up, .out = gate, .num_tokens = num_tokens}, context.queue());
  mixture.shared_w2.run(context, mixture.gate.data(), mixture.shared.data(), num_tokens);
}

}  // namespace

extern "C" {

tessera_status tessera_moe_create(tessera_context* context, const tessera_moe_desc* desc,
                                  const tessera_moe_weights* weights, int64_t max_tokens, tessera_moe** moe) {
  return guarded([&] {
    check_not_null(context, "context");
    check_not_null(desc, "desc");
    check_not_null(weights, "weights");
    check_not_null(moe, "moe");
    check_desc(*desc);
    check_size(max_tokens, 1, kMaxTokens, "max_tokens");
    const ops::InputMode input = input_mode_of(desc->input, "desc.input");
    const DType activation = activation_of(desc->activation, input);
    const ops::WeightFormat format = weight_of(weights->w1, desc->inner, desc->hidden, "weights.w1").format;
    context->executor->make_current();
    auto made = std::make_unique<tessera_moe>();
    made->context = context;
    made->max_tokens = max_tokens;
    ops::Planner planner = context->planner();
    made->op = planner.bind<ops::MoeExperts>("experts", {.hidden = desc->hidden,
                                                         .inner = desc->inner,
                                                         .first_expert = desc->first_expert,
                                                         .num_local = desc->num_local,
                                                         .top_k = desc->top_k,
                                                         .format = format,
                                                         .input = input,
                                                         .swiglu_limit = desc->swiglu_limit,
                                                         .activation = activation});
    made->kernel = planner.lines().back().chosen;
    made->combine = planner.bind<ops::MoeCombine>(
        "combine", {.hidden = desc->hidden, .top_k = desc->top_k, .activation = activation});
    made->weights = PlacedExperts(*context, made->op, made->op.desc, weights->w1, weights->w3, weights->w2);
    made->workspace = device::Buffer(static_cast<size_t>(made->op.workspace_bytes(max_tokens)), context->memory());
    if (weights->router != nullptr) add_mixture(*made, *desc, *weights);
    *moe = made.release();
  });
}

tessera_status tessera_moe_experts_run(tessera_moe* moe, const void* x, const int32_t* experts, const float* routing,
                                       void* out, int64_t num_tokens) {
  return guarded([&] {
    check_not_null(moe, "moe");
    check_tokens(num_tokens, moe->max_tokens);
    if (num_tokens == 0) return;
    check_pointer(x, kDataAlignment, "x");
    check_pointer(experts, alignof(int32_t), "experts");
    check_pointer(routing, alignof(float), "routing");
    check_pointer(out, kDataAlignment, "out");
    moe->context->executor->make_current();
    moe->run_experts({const_cast<void*>(x), moe->op.desc.activation, {num_tokens, moe->op.desc.hidden}}, experts,
                     routing, out);
  });
}

tessera_status tessera_moe_combine_run(tessera_moe* moe, const void* routed, void* out, int64_t num_tokens) {
  return guarded([&] {
    check_not_null(moe, "moe");
    check_tokens(num_tokens, moe->max_tokens);
    if (num_tokens == 0) return;
    check_pointer(routed, kDataAlignment, "routed");
    check_pointer(out, kDataAlignment, "out");
    moe->context->executor->make_current();
    moe->run_combine(const_cast<void*>(routed), nullptr, out, num_tokens);
  });
}

tessera_status tessera_moe_run(tessera_moe* moe, const void* x, const int32_t* token_ids, void* out, int32_t* experts,
                               float* routing, int64_t num_tokens) {
  return guarded([&] {
    check_not_null(moe, "moe");
    if (!moe->mixture.has_value()) {
      fail(ErrorCode::kInvalidArgument, "moe: was made without weights.router, so only its experts can run");
    }
    check_tokens(num_tokens, moe->max_tokens);
    if (num_tokens == 0) return;
    const Mixture& mixture = *moe->mixture;
    check_pointer(x, kDataAlignment, "x");
    check_pointer(out, kDataAlignment, "out");
    if (mixture.hash_table != nullptr) check_pointer(token_ids, alignof(int32_t), "token_ids");
    if (experts == nullptr) experts = mixture.experts.as<int32_t>();
    if (routing == nullptr) routing = mixture.routing.as<float>();
    check_pointer(experts, alignof(int32_t), "experts");
    check_pointer(routing, alignof(float), "routing");
    const tessera_context& context = *moe->context;
    const ops::MoeExperts::Desc& desc = moe->op.desc;
    const TensorView view{const_cast<void*>(x), desc.activation, {num_tokens, desc.hidden}};
    context.executor->make_current();
    mixture.router_map.run(context, view.data, mixture.logits.data(), num_tokens);
    mixture.router.run({.logits = mixture.logits.as<float>(),
                        .bias = mixture.bias,
                        .table = mixture.hash_table,
                        .token_ids = token_ids,
                        .experts = experts,
                        .weights = routing,
                        .num_tokens = num_tokens},
                       context.queue());
    moe->run_experts(view, experts, routing, mixture.routed.data());
    if (mixture.has_shared) run_shared(context, mixture, view.data, num_tokens);
    moe->run_combine(mixture.routed.data(), mixture.has_shared ? mixture.shared.data() : nullptr, out, num_tokens);
  });
}

const char* tessera_moe_kernel(const tessera_moe* moe) {
  return moe == nullptr ? nullptr : moe->kernel.c_str();
}

void tessera_moe_destroy(tessera_moe* moe) {
  delete moe;
}
}
