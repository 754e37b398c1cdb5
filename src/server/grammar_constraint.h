// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a conversation asks of its answer's form -> what the engine may draw. Reasoning is free; the content, or the
// calls, are held to a grammar.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "engine/token_constraint.h"
#include "server/request.h"
#include "text/grammar/grammar.h"

namespace tessera::server {

// Whether a grammar that is not known yet may be compiled, which can take seconds.
enum class Compiling { kKnownOnly, kAny };
class GrammarUnknown : public Error {
 public:
  explicit GrammarUnknown(std::string key)
      : Error(ErrorCode::kResourceExhausted, "a grammar that is not compiled yet"), key_(std::move(key)) {}
  // text::GrammarDefinition::key() of it.
  const std::string& key() const { return key_; }

 private:
  std::string key_;
};

// From the answer's first token, the same for every choice. Compiles what the request needs: null where its format is
// text and it calls what it likes as it likes. With tool_choice required or named the answer is a block of calls; with
// auto and a strict tool, calls that it makes fit their tools. Throws RequestError, naming the field, where a schema or
// pattern cannot be held to; GrammarUnknown where `compiling` does not let it take the time that it needs.
std::shared_ptr<const engine::ConstraintSource> make_constraint(const ChatRequest& request, bool starts_in_reasoning,
                                                                text::GrammarCompiler& grammars,
                                                                const text::Tokenizer& tokenizer,
                                                                const std::vector<int32_t>& eos_ids,
                                                                Compiling compiling);

}  // namespace tessera::server
