// SPDX-License-Identifier: Apache-2.0
#pragma once
// What is refused of a regular expression before anything is compiled.
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::text {

inline constexpr size_t kMaxPatternRepeats = 4096;  // of a regular expression's characters, nested bounds multiplied

// Why a regular expression is not taken, in one line with expected and found; nothing where it is.
std::optional<std::string> find_pattern_fault(std::string_view pattern);

}  // namespace tessera::text
