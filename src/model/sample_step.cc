// SPDX-License-Identifier: Apache-2.0
#include "model/sample_step.h"

#include "base/error.h"

namespace tessera::model {

SampleStep::SampleStep(LayerBuilder& builder, device::Executor& executor)
    : op_(builder.bind<ops::Sample>("sample", {.vocab = builder.config.vocab_size})), executor_(executor) {
  row_ = device::Buffer(static_cast<size_t>(op_.desc.vocab) * sizeof(float), executor.memory());
  how_ = device::Buffer(sizeof(ops::SampleRow), executor.memory());
  token_ = device::Buffer(sizeof(int32_t), executor.memory());
}

// The values in the ops' memory; null where there are none.
template <class T>
const T* SampleStep::place(device::Buffer& buffer, std::span<const T> values) {
  if (values.empty()) return nullptr;
  if (executor_.memory().is_host()) return values.data();
  if (buffer.size() < values.size_bytes()) buffer = device::Buffer(values.size_bytes(), executor_.memory());
  executor_.memory().upload(buffer.data(), values.data(), values.size_bytes());
  return buffer.template as<T>();
}

void SampleStep::queue(float* logits, const ops::SampleRow* rows, const uint32_t* masks, int64_t num_rows,
                       int32_t* tokens, void* workspace) const {
  op_.run(
      {.logits = logits, .rows = rows, .num_rows = num_rows, .masks = masks, .tokens = tokens, .workspace = workspace},
      executor_.queue());
}

int32_t SampleStep::run(const SampleRequest& request, const float* logits, void* workspace) {
  TESSERA_CHECK(static_cast<int64_t>(request.logits.size()) == op_.desc.vocab, "one row of logits");
  device::MemorySpace& memory = executor_.memory();
  // Bias and penalties change the row that is drawn from.
  if (logits != nullptr) {
    memory.copy(row_.data(), logits, row_.size());
  } else {
    memory.upload(row_.data(), request.logits.data(), row_.size());
  }
  const ops::SampleRow how{
      .params = request.params, .position = request.position, .mask_row = request.mask.empty() ? -1 : 0};
  memory.upload(how_.data(), &how, sizeof(how));
  op_.run({.logits = row_.as<float>(),
           .rows = how_.as<ops::SampleRow>(),
           .num_rows = 1,
           .counts = place(counts_, request.counts),
           .bias_ids = place(bias_ids_, request.bias_ids),
           .bias_values = place(bias_values_, request.bias_values),
           .num_bias = static_cast<int64_t>(request.bias_ids.size()),
           .masks = place(mask_, request.mask),
           .tokens = token_.as<int32_t>(),
           .workspace = workspace},
          executor_.queue());
  int32_t token = 0;
  memory.download(&token, token_.data(), sizeof(token));
  if (token < 0)
    fail(ErrorCode::kNotFinite,
         "no token can be drawn: every logit is NaN, minus infinity or of a token that is not allowed");
  return token;
}

}  // namespace tessera::model
