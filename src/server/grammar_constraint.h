// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a conversation asks of its answer's form -> what the engine may draw. Reasoning is free; the content, or the
// calls, are held to a grammar.
#include <memory>

#include "engine/token_constraint.h"
#include "server/request.h"
#include "text/grammar/grammar.h"

namespace tessera::server {

// The same for every choice, before and after reasoning.
struct AnswerConstraint {
  std::shared_ptr<const engine::ConstraintSource> whole;            // from the answer's first token; null: none
  std::shared_ptr<const engine::ConstraintSource> after_reasoning;  // from the end of its reasoning
};

// Compiles what the request needs: nothing where its format is text and it calls what it likes as it likes. With
// tool_choice required or named the answer is a block of calls; with auto and a strict tool, calls that it makes fit
// their tools. Throws RequestError, naming the field, where a schema or pattern cannot be held to.
AnswerConstraint make_constraint(const ChatRequest& request, bool starts_in_reasoning, text::GrammarCompiler& grammars,
                                 const text::Tokenizer& tokenizer, const std::vector<int32_t>& eos_ids);

}  // namespace tessera::server
