// SPDX-License-Identifier: Apache-2.0
#include "model/layers/linear_layer.h"

namespace tessera::model {

ops::InputMode resolve_input(ops::InputMode mode, ops::WeightFormat format, InputRole role) {
  using ops::InputMode;
  using ops::WeightFormat;
  const bool is_quantised = format == WeightFormat::kNvfp4 || format == WeightFormat::kFp8Block;
  switch (mode) {
    case InputMode::kF32:
    case InputMode::kA16:
      return mode;
    case InputMode::kA4:
      return role != InputRole::kPlain && format == WeightFormat::kNvfp4 ? InputMode::kA4 : InputMode::kA16;
    case InputMode::kA8:
      return role == InputRole::kQuantised && is_quantised ? InputMode::kA8 : InputMode::kA16;
  }
  return mode;
}

LinearLayer::LinearLayer(LayerBuilder& builder, const std::string& name, InputRole role, DType output, int64_t groups)
    : LinearLayer(builder, name, builder.weights.shard(), name, role, output, groups) {}

LinearLayer::LinearLayer(LayerBuilder& builder, const std::string& name, const Shard& shard, const std::string& where,
                         InputRole role, DType output, int64_t groups)
    : name_(where) {
  const ops::WeightFormat format = builder.weights.part_format(name, shard);
  const Shape shape = builder.weights.part_shape(name, shard);
  const ops::Linear::Desc desc{.in = shape[1],
                               .out = shape[0] / groups,
                               .groups = groups,
                               .format = format,
                               .input = resolve_input(builder.precision.input, format, role),
                               .activation = builder.activation(),
                               .output = output};
  op_ = builder.bind<ops::Linear>(where, desc, builder.max_tokens * ops::kHcStreams);
  weight_ = builder.weights.load_part(name, shard, op_.packed_layout());
}

TensorView LinearLayer::run(const StepContext& context, const TensorView& x, int64_t num_rows) const {
  const TensorView y = take_output(context, num_rows);
  run_into(context, x, y, num_rows);
  return y;
}

void LinearLayer::run_into(const StepContext& context, const TensorView& x, const TensorView& y,
                           int64_t num_rows) const {
  op_.run({.x = x, .weight = weight_.view, .y = y, .num_tokens = num_rows, .workspace = context.workspace},
          context.queue);
  context.trace(name_, "", y);
}

NormLayer::NormLayer(LayerBuilder& builder, const std::string& where, const std::string& name, int64_t width)
    : where_(where) {
  op_ = builder.bind<ops::RmsNorm>(
      where,
      {.width = width, .eps = static_cast<float>(builder.config.rms_norm_eps), .activation = builder.activation()});
  if (!name.empty()) weight_ = builder.weights.load_vector(name);
}

void NormLayer::run(const StepContext& context, const TensorView& x, const TensorView& out, int64_t num_rows) const {
  op_.run({.x = x, .weight = weight_, .out = out, .num_rows = num_rows}, context.queue);
  context.trace(where_, "", out);
}

}  // namespace tessera::model
