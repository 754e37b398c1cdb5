// SPDX-License-Identifier: Apache-2.0
#pragma once
// "format" is an annotation to JSON Schema (draft 2020-12, Validation 7.2.1), "pattern" is not. The compiler takes a
// format that it knows instead of the pattern beside it.
#include <string>
#include <string_view>

namespace tessera::text {

// The schema, JSON, without the formats that have a pattern beside them; as it is where there are none.
std::string without_formats_beside_patterns(std::string_view schema);

}  // namespace tessera::text
