// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "numeric/nvfp4.h"
#include "ops/linear/linear.h"
#include "ops/moe/moe.h"
#include "ops/reference_rows.h"

namespace tessera::ops {

namespace {

constexpr int64_t kGrain = 1 << 15;  // multiply-adds worth waking a thread for

// The workspace. A slot is (token, rank of the expert in its list); slots are grouped by expert.
struct Scratch {
  float* x;          // [tokens, hidden] as the multiply sees it
  float* x_factors;  // [tokens]
  float* h;          // [tokens * top_k, inner]
  float* h_factors;  // [tokens * top_k]
  int32_t* slots;    // [tokens * top_k]: local slots, by expert, tokens ascending
  int32_t* begins;   // [num_local + 1]: each local expert's range in `slots`
  int32_t* active;   // [num_local]: local experts that have a slot
};

int64_t layout_scratch(const MoeExperts::Desc& desc, int64_t num_tokens, char* base, Scratch* scratch) {
  int64_t used = 0;
  const auto take = [&](int64_t count) {
    char* at = base + used;
    used += (count * 4 + 63) / 64 * 64;
    return at;
  };
  const int64_t num_slots = num_tokens * desc.top_k;
  Scratch s{};
  s.x = reinterpret_cast<float*>(take(num_tokens * desc.hidden));
  s.x_factors = reinterpret_cast<float*>(take(num_tokens));
  s.h = reinterpret_cast<float*>(take(num_slots * desc.inner));
  s.h_factors = reinterpret_cast<float*>(take(num_slots));
  s.slots = reinterpret_cast<int32_t*>(take(num_slots));
  s.begins = reinterpret_cast<int32_t*>(take(desc.num_local + 1));
  s.active = reinterpret_cast<int32_t*>(take(desc.num_local));
  if (scratch != nullptr) *scratch = s;
  return used;
}

// Fills slots, begins and active; returns how many experts are active.
int64_t group_by_expert(const MoeExperts::Desc& desc, const MoeExperts::Args& args, const Scratch& scratch) {
  const int64_t num_slots = args.num_tokens * desc.top_k;
  const auto local = [&](int64_t slot) { return args.experts[slot] - desc.first_expert; };
  const auto is_local = [&](int64_t slot) { return local(slot) >= 0 && local(slot) < desc.num_local; };
  std::fill_n(scratch.begins, desc.num_local + 1, 0);
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    if (is_local(slot)) ++scratch.begins[local(slot) + 1];
  }
  int64_t num_active = 0;
  for (int64_t e = 0; e < desc.num_local; ++e) {
    if (scratch.begins[e + 1] > 0) scratch.active[num_active++] = static_cast<int32_t>(e);
    scratch.begins[e + 1] += scratch.begins[e];
  }
  // begins[e] serves as the cursor of expert e, then is moved back by one expert.
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    if (is_local(slot)) scratch.slots[scratch.begins[local(slot)]++] = static_cast<int32_t>(slot);
  }
  for (int64_t e = desc.num_local; e > 0; --e) scratch.begins[e] = scratch.begins[e - 1];
  scratch.begins[0] = 0;
  return num_active;
}

void zero_foreign_slots(const MoeExperts::Desc& desc, const MoeExperts::Args& args) {
  const float zeros[64] = {};
  for (int64_t slot = 0; slot < args.num_tokens * desc.top_k; ++slot) {
    const int64_t e = args.experts[slot] - desc.first_expert;
    if (e >= 0 && e < desc.num_local) continue;
    for (int64_t i = 0; i < desc.hidden; i += 64) {
      store_floats(args.out, slot * desc.hidden + i, std::min<int64_t>(64, desc.hidden - i), zeros);
    }
  }
}

}  // namespace

std::string MoeExperts::Desc::to_string() const {
  return fmt::format("{} {} experts of [{}, {}] top {} {}", ops::to_string(format), num_local, inner, hidden, top_k,
                     ops::to_string(input));
}

int64_t moe_experts_reference_workspace(const MoeExperts::Desc& desc, int64_t max_tokens) {
  return layout_scratch(desc, max_tokens, nullptr, nullptr);
}

bool moe_experts_reference_supports(const MoeExperts::Desc& desc, std::string& why_not) {
  const Linear::Desc gate{.in = desc.hidden, .out = desc.inner, .format = desc.format, .input = desc.input};
  const Linear::Desc down{.in = desc.inner, .out = desc.hidden, .format = desc.format, .input = desc.input};
  return linear_reference_supports(gate, why_not) && linear_reference_supports(down, why_not);
}

void moe_experts_reference(const MoeExperts::Desc& desc, const MoeExperts::Args& args, device::Queue& queue) {
  Scratch scratch{};
  layout_scratch(desc, args.num_tokens, static_cast<char*>(args.workspace), &scratch);
  const int64_t num_active = group_by_expert(desc, args, scratch);
  zero_foreign_slots(desc, args);
  const int64_t rows_each = std::max<int64_t>(1, args.num_tokens * desc.top_k / std::max<int64_t>(1, num_active));

  queue.parallel_for(args.num_tokens, std::max<int64_t>(1, kGrain / (4 * desc.hidden)),
                     [&](int64_t begin, int64_t end) {
                       for (int64_t t = begin; t < end; ++t) {
                         float* row = scratch.x + t * desc.hidden;
                         load_floats(args.x, t * desc.hidden, desc.hidden, row);
                         scratch.x_factors[t] = prepare_input_row(desc.input, row, desc.hidden, 0);
                       }
                     });

  // Gate and up: item = (active expert, inner row). Each keeps its own tensor scale.
  const int64_t gate_grain = std::max<int64_t>(1, kGrain / (2 * desc.hidden * rows_each));
  queue.parallel_for(num_active * desc.inner, gate_grain, [&](int64_t begin, int64_t end) {
    float w1[kMaxLinearIn], w3[kMaxLinearIn];
    for (int64_t item = begin; item < end; ++item) {
      const int64_t e = scratch.active[item / desc.inner], n = item % desc.inner;
      decode_weight_row(args.w1[e], n, w1);
      decode_weight_row(args.w3[e], n, w3);
      for (int64_t i = scratch.begins[e]; i < scratch.begins[e + 1]; ++i) {
        const int64_t slot = scratch.slots[i], t = slot / desc.top_k;
        const float* x = scratch.x + t * desc.hidden;
        const float gate = dot(x, w1, desc.hidden) * (scratch.x_factors[t] * args.w1[e].tensor_scale);
        const float up = dot(x, w3, desc.hidden) * (scratch.x_factors[t] * args.w3[e].tensor_scale);
        const float h = swiglu_value(round_to(desc.activation, gate), round_to(desc.activation, up), desc.swiglu_limit);
        scratch.h[slot * desc.inner + n] = round_to(desc.activation, h * args.routing[slot]);
      }
    }
  });

  queue.parallel_for(
      args.num_tokens * desc.top_k, std::max<int64_t>(1, kGrain / (4 * desc.inner)), [&](int64_t begin, int64_t end) {
        for (int64_t slot = begin; slot < end; ++slot) {
          const int64_t e = args.experts[slot] - desc.first_expert;
          if (e < 0 || e >= desc.num_local) continue;
          const float bound = desc.swiglu_limit > 0
                                  ? numeric::nvfp4_bounded_activation_scale(args.routing[slot], desc.swiglu_limit)
                                  : 0;
          scratch.h_factors[slot] = prepare_input_row(desc.input, scratch.h + slot * desc.inner, desc.inner, bound);
        }
      });

  const int64_t down_grain = std::max<int64_t>(1, kGrain / (desc.inner * rows_each));
  queue.parallel_for(num_active * desc.hidden, down_grain, [&](int64_t begin, int64_t end) {
    float w2[kMaxLinearIn];
    for (int64_t item = begin; item < end; ++item) {
      const int64_t e = scratch.active[item / desc.hidden], n = item % desc.hidden;
      decode_weight_row(args.w2[e], n, w2);
      for (int64_t i = scratch.begins[e]; i < scratch.begins[e + 1]; ++i) {
        const int64_t slot = scratch.slots[i];
        const float y =
            dot(scratch.h + slot * desc.inner, w2, desc.inner) * (scratch.h_factors[slot] * args.w2[e].tensor_scale);
        store_floats(args.out, slot * desc.hidden + n, 1, &y);
      }
    }
  });
}

}  // namespace tessera::ops
