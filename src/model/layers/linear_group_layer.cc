// SPDX-License-Identifier: Apache-2.0
#include "model/layers/linear_group_layer.h"

#include <fmt/format.h>

#include <utility>

#include "base/error.h"

namespace tessera::model {

LinearGroupLayer::LinearGroupLayer(LayerBuilder& builder, const std::string& where,
                                   const std::vector<const LinearLayer*>& all, const NormLayer* norm) {
  if (bind_all_formats(builder, where, all)) return;
  std::vector<bool> is_taken(all.size());
  for (size_t first = 0; first < all.size(); ++first) {
    if (is_taken[first]) continue;
    const auto is_alike = [&](const LinearLayer& other) {
      const ops::Linear::Desc &a = all[first]->op().desc, &b = other.op().desc;
      return all[first]->op().chosen() == other.op().chosen() && a.in == b.in && a.format == b.format &&
             a.input == b.input;
    };
    Group group;
    ops::LinearGroup::Desc desc;
    for (size_t i = first; i < all.size() && desc.maps.size() < ops::LinearGroup::kMostMaps; ++i) {
      if (is_taken[i] || !is_alike(*all[i])) continue;
      group.members.push_back(i);
      desc.maps.push_back(all[i]->op().desc);
    }
    const std::string name = groups_.empty() ? where : fmt::format("{}.{}", where, groups_.size() + 1);
    if (norm != nullptr && desc.maps.size() == all.size()) {
      ops::LinearGroup::Desc with_norm = desc;
      with_norm.norm = norm->op().desc;
      group.op =
          builder.bind_fused<ops::LinearGroup>(name, with_norm, {all[first]->op().chosen(), norm->op().chosen()});
    }
    if (!group.op.is_bound() && desc.maps.size() > 1) {
      group.op = builder.bind_fused<ops::LinearGroup>(name, desc, {all[first]->op().chosen()});
    }
    if (!group.op.is_bound()) {
      alone_.push_back(first);
      continue;
    }
    for (const size_t i : group.members) is_taken[i] = true;
    groups_.push_back(std::move(group));
  }
}

bool LinearGroupLayer::bind_all_formats(LayerBuilder& builder, const std::string& where,
                                        const std::vector<const LinearLayer*>& all) {
  ops::LinearGroup::Desc desc;
  Group group;
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i]->op().chosen() != all.front()->op().chosen()) return false;
    desc.maps.push_back(all[i]->op().desc), group.members.push_back(i);
  }
  desc = ops::by_format(std::move(desc));
  if (desc.parts.empty()) return false;
  group.op = builder.bind_fused<ops::LinearGroup>(where, desc, {all.front()->op().chosen()});
  if (!group.op.is_bound()) return false;
  groups_.push_back(std::move(group));
  return true;
}

void LinearGroupLayer::run(const StepContext& context, const TensorView& x, std::span<const Call> calls,
                           const NormLayer* norm) const {
  const int64_t n = x.shape[0];
  TESSERA_CHECK(norm != nullptr || !has_norm(), "whoever norms maps' input");
  if (norm != nullptr && (context.tracer != nullptr || !has_norm())) norm->run(context, x, x, n);
  if (context.tracer != nullptr) {
    for (const Call& call : calls) call.map->run_into(context, x, call.y, n);
    return;
  }
  for (const Group& group : groups_) {
    ops::LinearGroup::Args args{.x = x,
                                .norm_weight = has_norm() ? norm->weight() : TensorView{},
                                .weights = {},
                                .y = {},
                                .num_tokens = n,
                                .workspace = context.workspace};
    for (size_t i = 0; i < group.members.size(); ++i) {
      const Call& call = calls[group.members[i]];
      args.weights[i] = call.map->weight(), args.y[i] = call.y;
    }
    group.op.run(args, context.queue);
  }
  for (const size_t i : alone_) calls[i].map->run_into(context, x, calls[i].y, n);
}

}  // namespace tessera::model
