// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which of JSON's types the values of a schema can have, as far as the schema says it.
#include <cstddef>
#include <string_view>

#include "base/json.h"

namespace tessera::text {

// Bits, one a type of JSON Schema. "number" is kNumber and kInteger, since an integer is a number too.
using JsonTypes = unsigned;
inline constexpr JsonTypes kNullType = 1, kBooleanType = 2, kObjectType = 4, kArrayType = 8, kStringType = 16,
                           kIntegerType = 32, kNumberType = 64;
inline constexpr JsonTypes kAnyType = 127;

// Of a type's name; 0: there is no such type.
JsonTypes types_named(std::string_view name);

// Of the value of "type", a name or an array of names; 0 where it is neither.
JsonTypes types_listed(const Json& type);

// Of a value itself. 2.0 is an integer.
JsonTypes types_of_value(const Json& value);

// Of all values that `schema` admits, at most; kAnyType where it does not say. References are looked up in `root`, and
// at most `max_schemas` schemas are looked at.
JsonTypes types_admitted(const Json& schema, const Json& root, size_t max_schemas);

}  // namespace tessera::text
