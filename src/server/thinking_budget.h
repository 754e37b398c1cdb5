// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reasoning of at most so many tokens: after them its end is all that may be drawn, and is not drawn again. The answer
// stays one sequence of the engine, so that neither a full waiting room nor a drain comes between the reasoning and
// what follows it.
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/token_constraint.h"
#include "text/tokenizer/tokenizer.h"

namespace tessera::server {

struct ThinkingBudget {
  int64_t num_tokens = 0;
  int32_t end_think_id = -1;
};

// Of an answer that starts in its reasoning, or, where the budget is none, behind the end of it. But for the budget it
// is held to `inner` (null: to nothing) and, where that is null, to the tokens of `allowed` (null: to all). `tokenizer`
// must outlive it; text of `eos_ids` is no part of an answer.
std::shared_ptr<const engine::ConstraintSource> with_thinking_budget(
    const ThinkingBudget& budget, std::shared_ptr<const engine::ConstraintSource> inner,
    std::shared_ptr<const std::vector<uint32_t>> allowed, const text::Tokenizer& tokenizer,
    const std::vector<int32_t>& eos_ids);

}  // namespace tessera::server
