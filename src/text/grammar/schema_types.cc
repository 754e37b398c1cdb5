// SPDX-License-Identifier: Apache-2.0
#include "text/grammar/schema_types.h"

#include <cmath>
#include <string>

#include "base/strings.h"

namespace tessera::text {

namespace {

class Admitted {
 public:
  Admitted(const Json& root, size_t max_schemas) : root_(root), left_(max_schemas) {}

  JsonTypes types(const Json& schema) {
    if (left_ == 0) return kAnyType;
    --left_;
    if (const Json* uri = schema.find("$ref")) {
      const Json* target = found(uri->string());
      return target == nullptr ? kAnyType : types(*target);
    }
    if (const Json* value = schema.find("const")) return types_of_value(*value);
    if (const Json* values = schema.find("enum")) {
      JsonTypes all = 0;
      for (const Json& value : values->array()) all |= types_of_value(value);
      return all;
    }
    for (const std::string_view key : {"anyOf", "oneOf"}) {
      if (const Json* options = schema.find(key)) return types_of_any(*options);
    }
    if (const Json* parts = schema.find("allOf")) {
      JsonTypes all = kAnyType;
      for (const Json& part : parts->array()) all &= types(part);
      return all;
    }
    const Json* type = schema.find("type");
    return type == nullptr ? kAnyType : types_listed(*type);
  }

 private:
  JsonTypes types_of_any(const Json& options) {
    JsonTypes all = 0;
    for (const Json& option : options.array()) all |= types(option);
    return all;
  }

  // "#", or "#/" and keys; as the compiler reads it, without escapes.
  const Json* found(std::string_view uri) const {
    if (uri == "#") return &root_;
    if (!uri.starts_with("#/")) return nullptr;
    const Json* at = &root_;
    for (const std::string_view key : split(uri.substr(2), '/')) {
      if (at != nullptr && !key.empty()) at = at->find(key);
    }
    return at;
  }

  const Json& root_;
  size_t left_;
};

}  // namespace

JsonTypes types_named(std::string_view name) {
  constexpr std::pair<std::string_view, JsonTypes> kNames[] = {{"null", kNullType},
                                                               {"boolean", kBooleanType},
                                                               {"object", kObjectType},
                                                               {"array", kArrayType},
                                                               {"string", kStringType},
                                                               {"integer", kIntegerType},
                                                               {"number", kNumberType | kIntegerType}};
  for (const auto& [known, types] : kNames) {
    if (known == name) return types;
  }
  return 0;
}

JsonTypes types_listed(const Json& type) {
  if (type.kind() == Json::Kind::kString) return types_named(type.string());
  JsonTypes all = 0;
  for (const Json& name : type.array()) {
    const JsonTypes types = types_named(name.string());
    if (types == 0) return 0;
    all |= types;
  }
  return all;
}

JsonTypes types_of_value(const Json& value) {
  switch (value.kind()) {
    case Json::Kind::kNull:
      return kNullType;
    case Json::Kind::kBool:
      return kBooleanType;
    case Json::Kind::kInt:
    case Json::Kind::kBigInt:
      return kIntegerType;
    case Json::Kind::kDouble:
      return value.number() == std::floor(value.number()) ? kIntegerType : kNumberType;
    case Json::Kind::kString:
      return kStringType;
    case Json::Kind::kArray:
      return kArrayType;
    case Json::Kind::kObject:
      return kObjectType;
  }
  return kAnyType;
}

JsonTypes types_admitted(const Json& schema, const Json& root, size_t max_schemas) {
  return Admitted(root, max_schemas).types(schema);
}

}  // namespace tessera::text
