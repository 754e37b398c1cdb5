// SPDX-License-Identifier: Apache-2.0
#pragma once
// A schema as the compiler is to read it: every "pattern" and every name of "patternProperties" is in its canonical
// form (pattern.h), and a "format" beside a pattern is gone: it is an annotation to JSON
// Schema (draft 2020-12, Validation 7.2.1), and the compiler would take it instead.
#include <string>
#include <string_view>

#include "text/grammar/pattern.h"

namespace tessera::text {

// `schema` is JSON. `use`: of the strings that it is of. Patterns that have none are left out.
std::string schema_for_compiler(std::string_view schema, PatternUse use);

}  // namespace tessera::text
