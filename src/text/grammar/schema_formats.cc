// SPDX-License-Identifier: Apache-2.0
#include "text/grammar/schema_formats.h"

#include "base/json.h"
#include "text/chat/python_json.h"

namespace tessera::text {

namespace {

constexpr std::string_view kFormat = "format", kPattern = "pattern";

// Of members whose values are data, not schemas.
bool is_data(std::string_view key) {
  return key == "const" || key == "enum" || key == "default" || key == "examples";
}

// Members of a map of schemas are no keywords, whatever their names are.
bool is_map_of_schemas(std::string_view key) {
  return key == "properties" || key == "patternProperties" || key == "$defs" || key == "definitions";
}

bool is_string(const Json* value) {
  return value != nullptr && value->kind() == Json::Kind::kString;
}

void append(std::string& out, const Json& value, bool is_schema) {
  if (value.kind() == Json::Kind::kArray) {
    const char* separator = "[";
    for (const Json& element : value.array()) {
      out += separator;
      append(out, element, is_schema);
      separator = ", ";
    }
    out += value.array().empty() ? "[]" : "]";
    return;
  }
  if (value.kind() != Json::Kind::kObject) {
    out += python_json(value);
    return;
  }
  const bool drops = is_schema && is_string(value.find(kFormat)) && is_string(value.find(kPattern));
  out += '{';
  const char* separator = "";
  for (const auto& [key, member] : value.object()) {
    if (drops && key == kFormat) continue;
    out += separator + json_quoted(key) + ": ";
    if (is_schema && is_data(key)) {
      out += python_json(member);
    } else {
      append(out, member, !(is_schema && is_map_of_schemas(key)));
    }
    separator = ", ";
  }
  out += '}';
}

}  // namespace

std::string without_formats_beside_patterns(std::string_view schema) {
  const auto has = [&](std::string_view word) { return schema.find(word) != std::string_view::npos; };
  if (!has(kFormat) || !has(kPattern)) return std::string(schema);
  std::string out;
  append(out, Json::parse_exact(schema, "schema"), true);
  return out;
}

}  // namespace tessera::text
