// SPDX-License-Identifier: Apache-2.0
// Schemas as JSON Schema.
#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "server/schema.h"

namespace tessera::server {

namespace {

using OrderedJson = nlohmann::ordered_json;

OrderedJson to_json(const Schema& schema);

// Adds null to what `out` takes.
OrderedJson with_null(OrderedJson out) {
  if (out.contains("anyOf")) {
    out["anyOf"].push_back({{"type", "null"}});
  } else if (out.contains("type")) {
    out["type"] = OrderedJson::array({out["type"], "null"});
    if (out.contains("enum")) out["enum"].push_back(nullptr);
  }
  return out;
}

OrderedJson fields_json(const std::vector<Field>& fields, OrderedJson properties, OrderedJson names) {
  for (const Field& field : fields) {
    properties[field.name] = to_json(field.schema);
    if (field.is_required) names.push_back(field.name);
  }
  OrderedJson out = {{"type", "object"}};
  if (!properties.empty()) out["properties"] = std::move(properties);
  if (!names.empty()) out["required"] = std::move(names);
  return out;
}

OrderedJson plain_json(const Schema& schema) {
  const auto add_bounds = [&](OrderedJson& out, const char* least, const char* most) {
    if (schema.min_length > 0) out[least] = schema.min_length;
    if (schema.max_length < std::numeric_limits<size_t>::max()) out[most] = schema.max_length;
  };
  OrderedJson out = OrderedJson::object();
  switch (schema.kind) {
    case Schema::Kind::kAny:
      break;
    case Schema::Kind::kNull:
      out["type"] = "null";
      break;
    case Schema::Kind::kBoolean:
      out["type"] = "boolean";
      if (schema.is_unsupported) out["enum"] = OrderedJson::array({schema.least != 0});
      break;
    case Schema::Kind::kInteger:
      out = {{"type", "integer"}, {"minimum", schema.least}, {"maximum", schema.most}};
      break;
    case Schema::Kind::kNumber:
      out = {{"type", "number"}, {"minimum", schema.minimum}, {"maximum", schema.maximum}};
      break;
    case Schema::Kind::kString:
      out["type"] = "string";
      if (!schema.values.empty()) {
        out["enum"] = schema.values;
      } else {
        add_bounds(out, "minLength", "maxLength");
        if (!schema.characters.empty()) out["pattern"] = fmt::format("^[{}]+$", schema.characters);
      }
      break;
    case Schema::Kind::kArray:
      out = {{"type", "array"}, {"items", to_json(schema.choices.front())}};
      add_bounds(out, "minItems", "maxItems");
      break;
    case Schema::Kind::kObject:
      out = fields_json(schema.fields, OrderedJson::object(), OrderedJson::array());
      break;
    case Schema::Kind::kMap:
      out = {{"type", "object"}};
      if (const OrderedJson values = to_json(schema.choices.front()); !values.empty()) {
        out["additionalProperties"] = values;
      }
      if (!schema.characters.empty()) {
        out["propertyNames"] = {{"pattern", fmt::format("^[{}]+$", schema.characters)}};
      }
      add_bounds(out, "minProperties", "maxProperties");
      break;
    case Schema::Kind::kEither:
      out["anyOf"] = OrderedJson::array();
      for (const Schema& choice : schema.choices) out["anyOf"].push_back(to_json(choice));
      break;
    case Schema::Kind::kTagged:
      out["anyOf"] = OrderedJson::array();
      for (size_t i = 0; i < schema.choices.size(); ++i) {
        const bool may_miss = schema.values[i] == schema.tag_default;
        OrderedJson tag_values = OrderedJson::array({schema.values[i]});
        if (may_miss) tag_values.push_back(nullptr);
        const OrderedJson tag = {{schema.tag, {{"enum", std::move(tag_values)}}}};
        out["anyOf"].push_back(fields_json(schema.choices[i].fields, tag,
                                           may_miss ? OrderedJson::array() : OrderedJson::array({schema.tag})));
      }
      break;
  }
  if (schema.max_bytes < std::numeric_limits<size_t>::max()) {
    out["description"] = fmt::format("At most {} bytes as JSON text.", schema.max_bytes);
  }
  return out;
}

OrderedJson to_json(const Schema& schema) {
  OrderedJson out = plain_json(schema);
  if (schema.is_unsupported) {
    out["description"] = "Not supported: only values that mean what is done without the field.";
  }
  const bool adds_null = schema.is_nullable && schema.kind != Schema::Kind::kNull;
  return adds_null ? with_null(std::move(out)) : out;
}

}  // namespace

std::string json_schema(const Schema& schema) {
  return to_json(schema).dump();
}

}  // namespace tessera::server
