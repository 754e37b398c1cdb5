// SPDX-License-Identifier: Apache-2.0
#include "model/layers/vocabulary_head.h"

#include "base/error.h"
#include "base/integer_math.h"
#include "comm/rank_columns.h"

namespace tessera::model {

VocabularyHead::VocabularyHead(LayerBuilder& builder) : projection_(builder, "head", InputRole::kPlain, DType::kF32) {
  const int64_t vocab = builder.config.vocab_size, part = projection_.out_features();
  if (part == vocab) return;
  TESSERA_CHECK(builder.comm != nullptr && part * builder.comm->world() == vocab, "equal parts of the vocabulary");
  comm_ = builder.comm;
}

int64_t VocabularyHead::scratch_bytes(int64_t vocab, int64_t num_parts, int64_t num_rows) {
  if (num_parts == 1) return 0;
  constexpr auto kAlignment = static_cast<int64_t>(device::kBufferAlignment);
  const int64_t all = std::min(num_rows, kGatheredRows) * vocab * static_cast<int64_t>(sizeof(float));
  return round_up(all / num_parts, kAlignment) + round_up(all, kAlignment);
}

void VocabularyHead::run(const StepContext& context, const TensorView& h, const TensorView& logits,
                         int64_t num_rows) const {
  if (comm_ == nullptr) return projection_.run_into(context, h, logits, num_rows);
  const ArenaScope scope(context.arena);
  const int64_t width = projection_.out_features(), most = std::min(num_rows, kGatheredRows);
  const TensorView own = context.take(DType::kF32, {most, width});
  // Of one row the parts are its columns as they come.
  const TensorView parts = most > 1 ? context.take(DType::kF32, {num_parts() * most, width}) : TensorView{};
  for (int64_t begin = 0; begin < num_rows; begin += most) {
    const int64_t count = std::min(most, num_rows - begin);
    const TensorView in = rows_of(h, begin, count), out = rows_of(logits, begin, count), part = rows_of(own, 0, count);
    projection_.op().run(
        {.x = in, .weight = projection_.weight(), .y = part, .num_tokens = count, .workspace = context.workspace},
        context.queue);
    if (count == 1) {
      comm_->all_gather(part, out, context.queue);
      continue;
    }
    const TensorView all = reshape(rows_of(parts, 0, num_parts() * count), {num_parts(), count, width});
    comm_->all_gather(part, all, context.queue);
    comm::join_columns(all, out, context.queue);
  }
  context.trace("head", "", logits);
}

}  // namespace tessera::model
