// SPDX-License-Identifier: Apache-2.0
// Schemas as JSON Schema.
#include <fmt/format.h>

#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "server/json_text.h"
#include "server/schema.h"

namespace tessera::server {

namespace {

JsonObject to_json(const Schema& schema);

// A schema that takes null too where `takes_null`.
JsonObject typed(std::string_view type, bool takes_null) {
  if (takes_null) return {{"type", JsonArray{type, "null"}}};
  return {{"type", type}};
}

JsonArray enumerated(const std::vector<std::string>& values, bool takes_null) {
  JsonArray out;
  for (const std::string& value : values) out.add(value);
  if (takes_null) out.add(nullptr);
  return out;
}

// An object of these, behind those of `properties` and `names`.
JsonObject fields_json(const std::vector<Field>& fields, JsonObject properties, JsonArray names, bool takes_null) {
  for (const Field& field : fields) {
    properties.add(field.name, to_json(field.schema));
    if (field.is_required) names.add(field.name);
  }
  JsonObject out = typed("object", takes_null);
  if (!properties.is_empty()) out.add("properties", properties);
  if (!names.is_empty()) out.add("required", names);
  return out;
}

JsonArray tagged_json(const Schema& schema) {
  JsonArray out;
  for (size_t i = 0; i < schema.choices.size(); ++i) {
    const bool may_miss = schema.values[i] == schema.tag_default;
    const JsonObject tag{{schema.tag, JsonObject{{"enum", enumerated({schema.values[i]}, may_miss)}}}};
    JsonArray names;
    if (!may_miss) names.add(schema.tag);
    out.add(fields_json(schema.choices[i].fields, tag, names, false));
  }
  return out;
}

JsonObject plain_json(const Schema& schema, bool takes_null) {
  const auto add_bounds = [&](JsonObject& out, std::string_view least, std::string_view most) {
    if (schema.min_length > 0) out.add(least, schema.min_length);
    if (schema.max_length < std::numeric_limits<size_t>::max()) out.add(most, schema.max_length);
  };
  const auto any_of = [&](JsonArray choices) {
    if (takes_null) choices.add(typed("null", false));
    return JsonObject{{"anyOf", choices}};
  };
  JsonObject out;
  switch (schema.kind) {
    case Schema::Kind::kAny:
      break;
    case Schema::Kind::kNull:
      out = typed("null", false);
      break;
    case Schema::Kind::kBoolean:
      out = typed("boolean", takes_null);
      if (schema.is_unsupported) {
        JsonArray values{schema.least != 0};
        if (takes_null) values.add(nullptr);
        out.add("enum", values);
      }
      break;
    case Schema::Kind::kInteger:
      out = typed("integer", takes_null).add("minimum", schema.least).add("maximum", schema.most);
      break;
    case Schema::Kind::kNumber:
      out = typed("number", takes_null).add("minimum", schema.minimum).add("maximum", schema.maximum);
      break;
    case Schema::Kind::kString:
      out = typed("string", takes_null);
      if (!schema.values.empty()) {
        out.add("enum", enumerated(schema.values, takes_null));
      } else {
        add_bounds(out, "minLength", "maxLength");
        if (!schema.characters.empty()) out.add("pattern", fmt::format("^[{}]+$", schema.characters));
        // JSON Schema counts characters alone.
        if (schema.max_bytes < std::numeric_limits<size_t>::max()) {
          out.add("description", fmt::format("At most {} bytes of UTF-8.", schema.max_bytes));
        }
      }
      break;
    case Schema::Kind::kArray:
      out = typed("array", takes_null).add("items", to_json(schema.choices.front()));
      add_bounds(out, "minItems", "maxItems");
      break;
    case Schema::Kind::kObject:
      out = fields_json(schema.fields, {}, {}, takes_null);
      break;
    case Schema::Kind::kMap:
      out = typed("object", takes_null);
      if (const JsonObject values = to_json(schema.choices.front()); !values.is_empty()) {
        out.add("additionalProperties", values);
      }
      if (!schema.characters.empty()) {
        out.add("propertyNames", JsonObject{{"pattern", fmt::format("^[{}]+$", schema.characters)}});
      }
      add_bounds(out, "minProperties", "maxProperties");
      break;
    case Schema::Kind::kEither: {
      JsonArray choices;
      for (const Schema& choice : schema.choices) choices.add(to_json(choice));
      out = any_of(choices);
      break;
    }
    case Schema::Kind::kTagged:
      out = any_of(tagged_json(schema));
      break;
  }
  return out;
}

JsonObject to_json(const Schema& schema) {
  JsonObject out = plain_json(schema, schema.is_nullable && schema.kind != Schema::Kind::kNull);
  if (schema.is_unsupported) {
    out.add("description", "Not supported: only values that mean what is done without the field.");
  } else if (schema.max_bytes < std::numeric_limits<size_t>::max()) {
    out.add("description", fmt::format("At most {} bytes as JSON text.", schema.max_bytes));
  }
  return out;
}

}  // namespace

std::string json_schema(const Schema& schema) {
  return to_json(schema).text();
}

}  // namespace tessera::server
