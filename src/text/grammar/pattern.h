// SPDX-License-Identifier: Apache-2.0
#pragma once
// Regular expressions of requests -> grammars of the texts that they are of from begin to end. What ECMAScript (which
// JSON Schema asks for) and Python's re read alike is taken, and \d, \w and . as ECMAScript has them: \d and \w are of
// ASCII, . is no end of a line. What they read differently, and what no grammar holds (lookaround, back references,
// word boundaries), is refused.
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::text {

// Where the text stands decides which characters it can have.
enum class PatternUse {
  kAnswer,      // the answer itself: any but NUL
  kJsonString,  // inside a JSON string: others are written as its escapes, where nothing else fits
  kArgument,    // inside a JSON string or as it is: those that need no escape
};

inline constexpr size_t kMaxPatternRepeats = 4096;  // of a regular expression's characters, nested bounds multiplied

// ASCII, and empty where the empty text alone fits. Throws kInvalidArgument with place, expected and found.
std::string canonical_pattern(std::string_view pattern, PatternUse use);

// Why its size is not taken, in one line with expected and found; nothing where it is.
std::optional<std::string> find_pattern_excess(std::string_view pattern);

// Why a regular expression is not taken: either.
std::optional<std::string> find_pattern_fault(std::string_view pattern, PatternUse use);

}  // namespace tessera::text
