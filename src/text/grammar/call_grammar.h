// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tool calls in the chat format's markup as a structural tag, XGrammar's JSON for texts with schemas in them.
#include <string>

#include "text/grammar/definition.h"

namespace tessera::text {

// The block of calls of `definition`, from the empty line before it (or from inside its first tag) to its end.
std::string call_block_tag(const GrammarDefinition& definition);

}  // namespace tessera::text
