// SPDX-License-Identifier: Apache-2.0
#include "model/draw_check.h"

#include "base/error.h"

namespace tessera::model {

void check_draws(std::span<const SequenceSlice> slices, int32_t vocab_size) {
  int64_t num_masks = 0;
  for (const SequenceSlice& slice : slices) {
    if (slice.draw == nullptr) continue;
    TESSERA_CHECK(!slice.ids.empty(), "a token is drawn after another");
    if (slice.draw->mask.empty()) continue;
    TESSERA_CHECK(
        static_cast<int64_t>(slice.draw->mask.size()) == ops::mask_words(vocab_size) && ++num_masks <= kMaxMasksPerStep,
        "a mask has a bit for each token, and a step at most kMaxMasksPerStep masks");
  }
}

}  // namespace tessera::model
