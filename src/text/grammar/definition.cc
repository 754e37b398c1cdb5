// SPDX-License-Identifier: Apache-2.0
#include "text/grammar/definition.h"

#include <fmt/format.h>

namespace tessera::text {

namespace {

// Parts that no other separates.
void append_part(std::string& key, std::string_view part) {
  key += fmt::format("{}:{}", part.size(), part);
}

}  // namespace

std::string GrammarDefinition::key() const {
  std::string key = fmt::format("{}{}{}", static_cast<int>(content), allows_parallel ? 1 : 0, is_in_block ? 1 : 0);
  append_part(key, text);
  for (const CallableTool& tool : tools) {
    append_part(key, tool.name);
    append_part(key, tool.parameters);
    key += tool.is_strict ? '1' : '0';
  }
  return key;
}

}  // namespace tessera::text
