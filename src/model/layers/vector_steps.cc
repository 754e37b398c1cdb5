// SPDX-License-Identifier: Apache-2.0
#include "model/layers/vector_steps.h"

#include <vector>

#include "base/error.h"

namespace tessera::model {

void VectorSteps::run(const StepContext& context, const float* frequencies, const Rows& rows) const {
  if (rows.num_rows == 0) return;
  const int64_t num_vectors = rows.num_rows * rope.desc.vectors;
  if (norm) norm->run(context, rows.x, rows.x, num_vectors);
  rope.run({.x = rows.x, .positions = rows.positions, .frequencies = frequencies, .num_tokens = rows.num_rows},
           context.queue);
  if (!rotated.empty()) context.trace(rotated, "", rows.x);
  if (hadamard) hadamard->run({.x = rows.x, .num_rows = num_vectors}, context.queue);
  if (!transformed.empty()) context.trace(transformed, "", rows.x);
  if (write) {
    write->run({.rows = rows.x, .slots = rows.slots, .cache = rows.cache, .num_rows = rows.num_rows}, context.queue);
  }
}

VectorGroup::VectorGroup(LayerBuilder& builder, const std::string& where, const std::vector<const VectorSteps*>& all) {
  ops::NormRope::Desc desc;
  std::vector<ops::Chosen> parts;
  for (const VectorSteps* steps : all) {
    ops::NormRope::SetDesc& set = desc.sets.emplace_back();
    set.rope = steps->rope.desc;
    parts.push_back(steps->rope.chosen());
    const auto add = [&](const auto& bound, auto& of_set) {
      of_set = bound.desc;
      parts.push_back(bound.chosen());
    };
    if (steps->norm) add(steps->norm->op(), set.norm);
    if (steps->hadamard) add(*steps->hadamard, set.hadamard);
    if (steps->write) add(*steps->write, set.write);
  }
  op_ = builder.bind_fused<ops::NormRope>(where, desc, parts);
}

void VectorGroup::run(const StepContext& context, const float* frequencies, std::span<const Call> calls) const {
  if (!op_.is_bound() || context.tracer != nullptr) {
    for (const Call& call : calls) call.steps->run(context, frequencies, call.rows);
    return;
  }
  TESSERA_CHECK(calls.size() == op_.desc.sets.size(), "the vectors of a layer");
  ops::NormRope::Args args;
  for (size_t i = 0; i < calls.size(); ++i) {
    const VectorSteps::Rows& rows = calls[i].rows;
    args.sets[i] = {.x = rows.x,
                    .weight = calls[i].steps->norm ? calls[i].steps->norm->weight() : TensorView{},
                    .positions = rows.positions,
                    .frequencies = frequencies,
                    .slots = rows.slots,
                    .cache = rows.cache,
                    .num_rows = rows.num_rows};
  }
  op_.run(args, context.queue);
}

}  // namespace tessera::model
