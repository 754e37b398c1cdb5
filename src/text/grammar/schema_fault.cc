// SPDX-License-Identifier: Apache-2.0
// The compiler (XGrammar) takes the first of $ref, const, enum, anyOf, oneOf and allOf, or else what is of one type,
// and lets all else be; what it would not look at and what it would look at in another way than JSON Schema
// (draft 2020-12, "Validation" and "Core") is found here.
#include "text/grammar/schema_fault.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "base/json.h"
#include "base/strings.h"
#include "text/grammar/pattern.h"
#include "text/grammar/schema_types.h"

namespace tessera::text {

namespace {

// Keywords that change what is valid and that no grammar of ours holds an answer to.
constexpr std::string_view kUnheld[] = {
    "not",         "if",       "then",        "else",        "dependentRequired", "dependentSchemas", "dependencies",
    "uniqueItems", "contains", "minContains", "maxContains", "$dynamicRef",       "$recursiveRef",    "contentSchema"};
// What one kind of value stands behind.
constexpr std::string_view kCounts[] = {"minLength", "maxLength",     "minItems",
                                        "maxItems",  "minProperties", "maxProperties"};
constexpr std::string_view kBounds[] = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"};
constexpr std::string_view kListsOfSchemas[] = {"anyOf", "allOf", "oneOf", "prefixItems"};
constexpr std::string_view kSchemas[] = {"items", "additionalProperties", "unevaluatedProperties", "propertyNames",
                                         "unevaluatedItems"};
constexpr std::string_view kMapsOfSchemas[] = {"properties", "patternProperties", "$defs", "definitions"};

// Of a schema that has one of these nothing else counts, the first in this order.
constexpr std::string_view kAlone[] = {"$ref", "const", "enum", "anyOf", "oneOf", "allOf"};
// What holds values, and would be lost beside one of kAlone, beside counts and bounds. Not "type", which goes with
// const and enum as a rule: types() looks at it.
constexpr std::string_view kValidating[] = {"$ref",
                                            "const",
                                            "enum",
                                            "anyOf",
                                            "oneOf",
                                            "allOf",
                                            "properties",
                                            "required",
                                            "items",
                                            "prefixItems",
                                            "unevaluatedItems",
                                            "pattern",
                                            "patternProperties",
                                            "propertyNames",
                                            "additionalProperties",
                                            "unevaluatedProperties"};
// Names beside those of "properties".
constexpr std::string_view kOtherProperties[] = {"additionalProperties", "unevaluatedProperties", "patternProperties",
                                                 "propertyNames"};
// Schemas looked at to know the types of one.
constexpr size_t kMaxTypeSteps = 1000;

template <size_t kCount>
bool is_in(const std::string_view (&names)[kCount], std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

bool is_bool(const Json& value, bool expected) {
  return value.kind() == Json::Kind::kBool && value.boolean() == expected;
}

bool is_of_one_type(std::string_view key) {
  return is_in(kCounts, key) || is_in(kBounds, key) || key == "required" || key == "pattern";
}

class SchemaWalk {
 public:
  SchemaWalk(const Json& root, SchemaUse use) : root_(root), use_(use), is_lenient_(use == SchemaUse::kTool) {}

  std::optional<std::string> fault() { return std::move(fault_); }

  void walk(const Json& schema, const std::string& path) {
    if (fault_ || !count(1)) return;
    if (is_lenient_) {
      if (schema.kind() == Json::Kind::kArray) return data(schema);  // refused by the compiler, where it looks
    } else {
      const bool is_schema = schema.kind() == Json::Kind::kObject || schema.kind() == Json::Kind::kBool;
      if (!is_schema) return note(path, "a schema: an object, true or false", describe(schema));
      beside_one_alone(schema, path);
      beside_each_other(schema, path);
    }
    for (const auto& [key, value] : schema.object()) keyword(key, value, path + "." + printable(key, 40));
  }

 private:
  static std::string member(const std::string& path, std::string_view key) { return path + "." + printable(key, 40); }

  // What the first of kAlone makes the compiler pass over.
  void beside_one_alone(const Json& schema, const std::string& path) {
    const auto first = std::ranges::find_if(kAlone, [&](std::string_view key) { return schema.find(key) != nullptr; });
    for (const auto& [key, value] : schema.object()) {
      if (first == std::end(kAlone)) {
        if (!is_of_one_type(key) || schema.find("type") != nullptr) continue;
        return note(member(path, key), "\"type\" beside it", "none");
      }
      const bool holds = is_in(kValidating, key) || is_in(kCounts, key) || is_in(kBounds, key);
      if (key == *first || !holds || is_bool(value, true)) continue;  // additionalProperties: true
      return note(member(path, key), fmt::format("nothing that holds values beside {}", *first), printable(key, 40));
    }
    const Json* type = schema.find("type");
    if (first != std::end(kAlone) && type != nullptr) types_beside(schema, *first, types_listed(*type), path);
  }

  void types_beside(const Json& schema, std::string_view alone, JsonTypes types, const std::string& path) {
    if (types == 0) return;  // no types: said where the keyword is
    if (alone == "enum") {
      const auto& values = schema.find(alone)->array();
      for (size_t i = 0; i < values.size(); ++i) {
        if ((types_of_value(values[i]) & ~types) == 0) continue;
        return note(fmt::format("{}.enum[{}]", path, i), "a value of the type beside it", describe(values[i]));
      }
    } else if ((types_admitted(schema, root_, kMaxTypeSteps) & ~types) != 0) {
      note(member(path, "type"), fmt::format("no other types than {} says", alone), describe(*schema.find("type")));
    }
  }

  // What is passed over where others are, without any of kAlone.
  void beside_each_other(const Json& schema, const std::string& path) {
    const auto refuse_beside = [&](std::string_view key, std::string_view other) {
      if (schema.find(key) == nullptr || schema.find(other) == nullptr) return;
      note(member(path, key), fmt::format("no {} beside it", other), "both");
    };
    refuse_beside("patternProperties", "properties");
    refuse_beside("propertyNames", "properties");
    refuse_beside("propertyNames", "patternProperties");
    const Json* patterns = schema.find("patternProperties");
    if (patterns != nullptr && patterns->object().size() > 1) {
      note(member(path, "patternProperties"), "one pattern, since a name may fit several",
           std::to_string(patterns->object().size()));
    }
    const Json* others = schema.find("additionalProperties");
    if (schema.find("propertyNames") != nullptr && others != nullptr && is_bool(*others, false)) {
      note(member(path, "propertyNames"), "additionalProperties that are not false", "false");
    }
    const Json* names = schema.find("propertyNames");
    if (names != nullptr && types_admitted(*names, root_, kMaxTypeSteps) != kStringType) {
      note(member(path, "propertyNames"), "a schema of strings alone", "other types");
    }
    if (use_ == SchemaUse::kStrictTool && &schema == &root_) other_parameters(schema, path);
    required(schema, path);
    number_of_properties(schema, path);
    range(schema, path);
  }

  // Names that are not named may come twice: a name that is required, and one more, differ for certain.
  void number_of_properties(const Json& schema, const std::string& path) {
    const Json* least = schema.find("minProperties");
    const bool has_others = std::ranges::any_of(kOtherProperties, [&](std::string_view key) {
      const Json* others = schema.find(key);
      return others != nullptr && !is_bool(*others, false);
    });
    if (least == nullptr || !has_others) return;
    const Json* names = schema.find("required");
    const size_t most = (names == nullptr ? 0 : names->array().size()) + 1;
    if (least->integer() <= static_cast<int64_t>(most)) return;
    note(member(path, "minProperties"),
         fmt::format("at most {}, where a name that \"properties\" does not have could come twice", most),
         describe(*least));
  }

  // The compiler writes numbers of a range with at most six decimals, and for a range without such a number nothing.
  void range(const Json& schema, const std::string& path) {
    const Json* type = schema.find("type");
    if (type == nullptr || (types_listed(*type) & kNumberType) == 0) return;
    constexpr double kUnit = 1e6, kNoBound = std::numeric_limits<double>::infinity();
    double low = -kNoBound, high = kNoBound;  // in units
    for (const std::string_view key : {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"}) {
      const Json* bound = schema.find(key);
      if (bound == nullptr) continue;
      double written = 0;
      const std::string text = fmt::format("{:.6f}", bound->number());
      std::from_chars(text.data(), text.data() + text.size(), written);
      if (written != bound->number()) {
        return note(member(path, key), "a number of at most six decimals", describe(*bound));
      }
      const double units = std::round(written * kUnit), next = key.starts_with("exclusive") ? 1 : 0;
      if (key.ends_with("inimum")) low = std::max(low, units + next);
      if (key.ends_with("aximum")) high = std::min(high, units - next);
    }
    if (low > high) note(path, "bounds with a number of at most six decimals between them", "none");
  }

  // Among a call's parameters the compiler lets others have the names of those that are named.
  void other_parameters(const Json& schema, const std::string& path) {
    const Json* properties = schema.find("properties");
    if (properties == nullptr || properties->object().empty()) return;
    for (const std::string_view key : {"additionalProperties", "unevaluatedProperties"}) {
      const Json* others = schema.find(key);
      if (others == nullptr || is_bool(*others, false)) continue;
      return note(member(path, key), "false beside the parameters of a strict tool", describe(*others));
    }
  }

  // The compiler requires what it knows a schema of.
  void required(const Json& schema, const std::string& path) {
    const Json* names = schema.find("required");
    if (names == nullptr) return;
    const Json* properties = schema.find("properties");
    for (size_t i = 0; i < names->array().size(); ++i) {
      const Json& name = names->array()[i];
      if (properties != nullptr && properties->find(name.string()) != nullptr) continue;
      return note(fmt::format("{}.required[{}]", path, i), "a name that \"properties\" beside it has", describe(name));
    }
  }

  // Of values whose schemas the compiler would take for something else.
  void kind(const std::string& key, const Json& value, const std::string& path) {
    using Kind = Json::Kind;
    const auto expect = [&](bool holds, std::string_view expected) {
      if (!holds) note(path, expected, describe(value));
    };
    const auto is = [&](Kind kind) { return value.kind() == kind; };
    if (key == "type") {
      expect(types_listed(value) != 0, "a type of JSON Schema, or an array of some");
    } else if (key == "$ref" || key == "pattern" || key == "format") {
      expect(is(Kind::kString), "a string");
    } else if (is_in(kCounts, key)) {
      expect(is(Kind::kInt) && value.integer() >= 0, "an integer from 0 on");
    } else if (is_in(kBounds, key)) {
      expect(is(Kind::kInt) || is(Kind::kDouble), "a number, of at most 64 bits where it is an integer");
    } else if (key == "enum" || is_in(kListsOfSchemas, key)) {
      expect(is(Kind::kArray) && !value.array().empty(), "an array of at least one");
    } else if (is_in(kMapsOfSchemas, key)) {
      expect(is(Kind::kObject), "an object of schemas by name");
    } else if (key == "required") {
      const auto is_name = [](const Json& name) { return name.kind() == Kind::kString; };
      expect(is(Kind::kArray) && std::ranges::all_of(value.array(), is_name), "an array of names");
    }
    if (key == "allOf") expect(value.array().size() == 1, "one schema, since several cannot be held to at once");
    if (key == "const" || key == "enum") exact(value, path);
  }

  // Integers that the compiler would round.
  void exact(const Json& value, const std::string& path) {
    if (value.kind() == Json::Kind::kBigInt) note(path, "integers of at most 64 bits", value.big_integer());
    for (const Json& item : value.array()) exact(item, path);
    for (const auto& [key, item] : value.object()) exact(item, path);
  }

  void keyword(const std::string& key, const Json& value, const std::string& path) {
    if (fault_) return;
    if (!is_lenient_) {
      if (is_in(kUnheld, key) && !is_bool(value, false)) {  // uniqueItems: false
        return note(path, "a keyword that a grammar can hold an answer to", key);
      }
      kind(key, value, path);
    }
    if (is_in(kCounts, key) && value.number() > static_cast<double>(kMaxSchemaRepeat)) {
      return note(path, fmt::format("at most {}", kMaxSchemaRepeat), describe(value));
    }
    if (key == "enum") {
      num_enum_values_ += value.array().size();
      if (num_enum_values_ > kMaxEnumValues) {
        return note(path, fmt::format("at most {} values of all enums together", kMaxEnumValues), "more");
      }
    }
    if (key == "pattern") pattern(value.string(), path);
    if (is_in(kMapsOfSchemas, key)) {
      for (const auto& [name, schema] : value.object()) {
        if (key == "patternProperties") pattern(name, path);
        walk(schema, member(path, name));
      }
    } else if (is_in(kListsOfSchemas, key)) {
      for (size_t i = 0; i < value.array().size(); ++i) walk(value.array()[i], fmt::format("{}[{}]", path, i));
    } else if (is_in(kSchemas, key)) {
      walk(value, path);
    } else {
      data(value);
    }
  }

  void pattern(const std::string& text, const std::string& path) {
    const PatternUse use = use_ == SchemaUse::kAnswer ? PatternUse::kJsonString : PatternUse::kArgument;
    const auto fault = is_lenient_ ? find_pattern_excess(text) : find_pattern_fault(text, use);
    if (fault && !fault_) fault_ = path + ": " + *fault;
  }

  void data(const Json& value) {
    if (fault_ || !count(1)) return;
    for (const Json& item : value.array()) data(item);
    for (const auto& [key, item] : value.object()) data(item);
  }

  bool count(size_t more) {
    num_nodes_ += more;
    if (num_nodes_ > kMaxSchemaNodes) {
      note("schema", fmt::format("at most {} objects, arrays and values", kMaxSchemaNodes), "more");
    }
    return !fault_;
  }

  // The first counts.
  void note(const std::string& path, std::string_view expected, std::string_view found) {
    if (!fault_) fault_ = fmt::format("{}: expected {}, found {}", path, expected, found);
  }

  const Json& root_;
  const SchemaUse use_;
  const bool is_lenient_;
  size_t num_nodes_ = 0, num_enum_values_ = 0;
  std::optional<std::string> fault_;
};

}  // namespace

std::optional<std::string> find_schema_fault(std::string_view schema, SchemaUse use) {
  const Json root = Json::parse_exact(schema, "schema");
  SchemaWalk walk(root, use);
  walk.walk(root, "schema");
  return walk.fault();
}

}  // namespace tessera::text
