// SPDX-License-Identifier: Apache-2.0
#include "model/draw_check.h"

#include <algorithm>

#include "base/error.h"

namespace tessera::model {

void check_draws(std::span<const SequenceSlice> slices, int32_t vocab_size) {
  int64_t num_masks = 0;
  for (size_t i = 0; i < slices.size(); ++i) {
    const Draw* draw = slices[i].draw;
    if (draw == nullptr) continue;
    TESSERA_CHECK(!slices[i].ids.empty(), "a token is drawn after another");
    if (draw->mask.empty()) continue;
    const auto earlier = slices.first(i);
    const bool is_new = std::none_of(earlier.begin(), earlier.end(), [&](const SequenceSlice& slice) {
      return slice.draw != nullptr && slice.draw->mask.data() == draw->mask.data();
    });
    num_masks += is_new ? 1 : 0;
    TESSERA_CHECK(
        static_cast<int64_t>(draw->mask.size()) == ops::mask_words(vocab_size) && num_masks <= kMaxMasksPerStep,
        "a mask has a bit for each token, and a step at most kMaxMasksPerStep masks");
  }
}

}  // namespace tessera::model
