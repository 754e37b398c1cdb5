// SPDX-License-Identifier: Apache-2.0
#pragma once
// What is refused of a JSON Schema before anything is compiled: what a grammar cannot hold an answer to, what the
// compiler would not look at, and what is too large.
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::text {

inline constexpr size_t kMaxSchemaNodes = 10000;  // objects, arrays and values of one JSON Schema
inline constexpr size_t kMaxEnumValues = 4096;    // of all enums of one together
inline constexpr size_t kMaxSchemaRepeat = 4096;  // minLength, maxItems and the like

enum class SchemaUse {
  kAnswer,      // JSON that fits it
  kStrictTool,  // a call's arguments, which fit it
  kTool,        // a call's arguments, held to what can be held: bounds alone are looked at
};

// Why a schema is not taken, in one line with place, expected and found; nothing where it is. `schema` is JSON; throws
// as Json::parse_exact does where it is none.
std::optional<std::string> find_schema_fault(std::string_view schema, SchemaUse use);

}  // namespace tessera::text
