// SPDX-License-Identifier: Apache-2.0
#include "engine/token_constraint.h"

#include "base/error.h"
#include "model/runner.h"

namespace tessera::engine {

std::vector<uint32_t> mask_without(int32_t id, int32_t vocab_size) {
  std::vector<uint32_t> mask(static_cast<size_t>(ops::mask_words(vocab_size)), ~uint32_t{0});
  mask[static_cast<size_t>(id) / 32] &= ~(uint32_t{1} << (id % 32));
  return mask;
}

void ask_constraint(TokenConstraint& constraint, int32_t vocab_size, std::vector<uint32_t>& mask) {
  mask.assign(static_cast<size_t>(ops::mask_words(vocab_size)), 0);
  switch (constraint.allowed(mask)) {
    case TokenConstraint::Allowed::kAll:
      return mask.clear();
    case TokenConstraint::Allowed::kSome:
      return;
    case TokenConstraint::Allowed::kNone:
      fail(ErrorCode::kInvalidArgument, "the grammar allows no token here");
  }
}

}  // namespace tessera::engine
