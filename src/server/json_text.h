// SPDX-License-Identifier: Apache-2.0
#pragma once
// JSON that is text already goes into an answer as it is: parsed and written again, integers of more than 64 bits would
// change or be refused.
#include <string>
#include <string_view>

namespace tessera::server {

// The object `object` with the members of the object `members` behind its own.
inline std::string with_members(std::string object, std::string_view members) {
  const bool is_empty = members.find_first_not_of(" }", 1) == std::string_view::npos;
  if (is_empty) return object;
  object.pop_back();
  if (object.size() > 1) object += ',';
  return object.append(members.substr(1));
}

}  // namespace tessera::server
