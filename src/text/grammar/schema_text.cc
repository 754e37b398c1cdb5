// SPDX-License-Identifier: Apache-2.0
#include "text/grammar/schema_text.h"

#include <optional>

#include "base/error.h"
#include "base/json.h"
#include "text/chat/python_json.h"

namespace tessera::text {

namespace {

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

class Writer {
 public:
  explicit Writer(PatternUse use) : use_(use) {}

  void schema(const Json& value) {
    if (value.kind() == Json::Kind::kArray) {
      const char* separator = "[";
      for (const Json& element : value.array()) {
        out_ += separator;
        schema(element);
        separator = ", ";
      }
      out_ += value.array().empty() ? "[]" : "]";
    } else if (value.kind() == Json::Kind::kObject) {
      object(value);
    } else {
      out_ += python_json(value);
    }
  }

  std::string take() { return std::move(out_); }

 private:
  void object(const Json& value) {
    const bool has_both = is_string(value.find("pattern")) && is_string(value.find("format"));
    begin();
    for (const auto& [key, member] : value.object()) {
      if (has_both && key == "format") continue;
      if (key == "pattern" && is_string(&member)) {
        if (const auto pattern = canonical(member.string())) name(key), out_ += json_quoted(*pattern);
        continue;
      }
      name(key);
      if (is_data(key)) {
        out_ += python_json(member);
      } else if (is_map_of_schemas(key)) {
        map(member, key == "patternProperties");
      } else {
        schema(member);
      }
    }
    out_ += '}';
  }

  void map(const Json& schemas, bool is_of_patterns) {
    if (schemas.kind() != Json::Kind::kObject) return schema(schemas);
    begin();
    for (const auto& [key, member] : schemas.object()) {
      const std::optional<std::string> own = is_of_patterns ? canonical(key) : key;
      if (!own) continue;
      name(*own);
      schema(member);
    }
    out_ += '}';
  }

  void begin() {
    out_ += '{';
    is_first_ = true;
  }
  void name(std::string_view key) {
    out_ += (is_first_ ? "" : ", ") + json_quoted(key) + ": ";
    is_first_ = false;
  }
  std::optional<std::string> canonical(const std::string& pattern) const {
    try {
      return canonical_pattern(pattern, use_);
    } catch (const Error&) {
      return std::nullopt;
    }
  }

  const PatternUse use_;
  std::string out_;
  bool is_first_ = false;
};

}  // namespace

std::string schema_for_compiler(std::string_view schema, PatternUse use) {
  const auto has = [&](std::string_view word) { return schema.find(word) != std::string_view::npos; };
  // "\u0070attern" is one, too.
  if (!has("pattern") && !has("\\u")) return std::string(schema);
  Writer writer(use);
  writer.schema(Json::parse_exact(schema, "schema"));
  return writer.take();
}

}  // namespace tessera::text
