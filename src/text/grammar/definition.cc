// SPDX-License-Identifier: Apache-2.0
#include "text/grammar/definition.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "base/json.h"
#include "base/strings.h"

namespace tessera::text {

namespace {

// Parts that no other separates.
void append_part(std::string& key, std::string_view part) {
  key += fmt::format("{}:{}", part.size(), part);
}

// How often a regular expression's characters come at most, nested bounds multiplied. Unbounded repetition counts once:
// it is a loop.
class PatternCount {
 public:
  explicit PatternCount(std::string_view pattern) : pattern_(pattern) {}

  // More than kMaxPatternRepeats: as many or more.
  size_t count() {
    std::vector<size_t> groups = {0};  // of the open groups, outermost first
    size_t last = 0;                   // of what a quantifier would repeat
    while (at_ < pattern_.size()) {
      const char c = pattern_[at_++];
      if (c == '(') {
        groups.push_back(0);
        continue;
      }
      if (c == '{') {
        const size_t times = bounds();
        if (times <= 1) continue;
        groups.back() += cut((times - 1) * last);
        last = cut(last * times);
      } else if (c == ')' && groups.size() > 1) {
        last = groups.back();
        groups.pop_back();
        groups.back() += last;
      } else {
        if (c == '\\') ++at_;
        if (c == '[') skip_class();
        last = 1;
        ++groups.back();
      }
      if (groups.back() > kMaxPatternRepeats) return groups.back();
    }
    size_t all = 0;
    for (const size_t group : groups) all += group;
    return all;
  }

 private:
  static size_t cut(size_t count) { return std::min(count, kMaxPatternRepeats + 1); }

  // "m}", "m,}" or "m,n}"; the larger one. 1 where it is none.
  size_t bounds() {
    const size_t end = has_closing_ ? pattern_.find('}', at_) : std::string_view::npos;
    has_closing_ = end != std::string_view::npos;
    if (!has_closing_) return 1;
    size_t most = 1;
    for (const std::string_view part : split(pattern_.substr(at_, end - at_), ',')) {
      size_t value = 0;
      const auto [stop, error] = std::from_chars(part.data(), part.data() + part.size(), value);
      if (error == std::errc::result_out_of_range) value = kMaxPatternRepeats + 1;
      most = std::max(most, cut(value));
    }
    at_ = end + 1;
    return most;
  }

  void skip_class() {
    if (at_ < pattern_.size() && pattern_[at_] == '^') ++at_;
    for (bool is_first = true; at_ < pattern_.size() && (is_first || pattern_[at_] != ']'); is_first = false) {
      at_ += pattern_[at_] == '\\' ? 2 : 1;
    }
    at_ = std::min(at_ + 1, pattern_.size());
  }

  std::string_view pattern_;
  size_t at_ = 0;
  bool has_closing_ = true;  // a '}' may follow
};

// Keywords that change what is valid and that no grammar of ours holds an answer to.
constexpr std::string_view kUnheld[] = {
    "not",         "if",       "then",        "else",        "dependentRequired", "dependentSchemas", "dependencies",
    "uniqueItems", "contains", "minContains", "maxContains", "$dynamicRef",       "$recursiveRef",    "contentSchema"};
constexpr std::string_view kRepeats[] = {"minLength", "maxLength",     "minItems",
                                         "maxItems",  "minProperties", "maxProperties"};
// Members are schemas, or their values are; everything below others is data.
constexpr std::string_view kSchemas[] = {
    "items", "additionalProperties", "unevaluatedProperties", "propertyNames", "unevaluatedItems", "anyOf", "allOf",
    "oneOf", "prefixItems"};
constexpr std::string_view kMapsOfSchemas[] = {"properties", "patternProperties", "$defs", "definitions"};

// Of a schema that has one of these nothing else counts, the first in this order.
constexpr std::string_view kAlone[] = {"$ref", "const", "enum", "anyOf", "oneOf", "allOf"};
// What holds values, and would be lost beside one of kAlone. Not "type", which goes with const and enum as a rule.
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
                                            "minLength",
                                            "maxLength",
                                            "pattern",
                                            "minimum",
                                            "maximum",
                                            "exclusiveMinimum",
                                            "exclusiveMaximum",
                                            "multipleOf",
                                            "minItems",
                                            "maxItems",
                                            "minProperties",
                                            "maxProperties",
                                            "patternProperties",
                                            "propertyNames"};
// What counts only where "type" says of what.
constexpr std::string_view kOfOneType[] = {
    "required", "minLength",        "maxLength",        "pattern",       "minimum",       "maximum",   "minItems",
    "maxItems", "exclusiveMinimum", "exclusiveMaximum", "minProperties", "maxProperties", "multipleOf"};

template <size_t kCount>
bool is_in(const std::string_view (&names)[kCount], std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

class SchemaWalk {
 public:
  explicit SchemaWalk(bool is_lenient) : is_lenient_(is_lenient) {}

  std::optional<std::string> fault() { return std::move(fault_); }

  void walk(const Json& schema, const std::string& path) {
    if (fault_ || !count(1)) return;
    if (schema.kind() == Json::Kind::kArray) {
      for (size_t i = 0; i < schema.array().size(); ++i) walk(schema.array()[i], fmt::format("{}[{}]", path, i));
      return;
    }
    if (!is_lenient_) siblings(schema, path);
    for (const auto& [key, value] : schema.object()) keyword(key, value, path + "." + printable(key, 40));
  }

 private:
  // The compiler takes the first of these and what is of one type with "type", and lets all else beside it be.
  void siblings(const Json& schema, const std::string& path) {
    const auto has = [&](std::string_view key) {
      return std::ranges::any_of(schema.object(), [&](const auto& member) { return member.first == key; });
    };
    const auto first = std::ranges::find_if(kAlone, has);
    for (const auto& [key, value] : schema.object()) {
      if (first != std::end(kAlone) && key != *first && is_in(kValidating, key)) {
        return note(path + "." + printable(key, 40), fmt::format("nothing that holds values beside {}", *first), key);
      }
      if (first == std::end(kAlone) && !has("type") && is_in(kOfOneType, key)) {
        return note(path + "." + printable(key, 40), "\"type\" beside it", "none");
      }
    }
  }

  void keyword(const std::string& key, const Json& value, const std::string& path) {
    if (fault_) return;
    const bool is_harmless = value.kind() == Json::Kind::kBool && !value.boolean();  // uniqueItems: false
    if (!is_lenient_ && is_in(kUnheld, key) && !is_harmless) {
      return note(path, "a keyword that a grammar can hold an answer to", key);
    }
    if (is_in(kRepeats, key) && value.number() > static_cast<double>(kMaxSchemaRepeat)) {
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
        walk(schema, path + "." + printable(name, 40));
      }
    } else if (is_in(kSchemas, key)) {
      walk(value, path);
    } else {
      data(value);
    }
  }

  void pattern(const std::string& text, const std::string& path) {
    // XGrammar makes strings of the others without JSON's escapes.
    const auto is_printable = [](unsigned char byte) { return byte >= 0x20 && byte < 0x7f; };
    if (!is_lenient_ && !std::all_of(text.begin(), text.end(), is_printable)) {
      return note(path, "a regular expression in printable ASCII characters", "\"" + printable(text, 60) + "\"");
    }
    if (text.size() > kMaxPatternRepeats) {
      return note(path, fmt::format("a regular expression of at most {} bytes", kMaxPatternRepeats),
                  std::to_string(text.size()));
    }
    if (const auto fault = find_pattern_fault(text)) fault_ = path + ": " + *fault;
  }

  void data(const Json& value) {
    if (fault_ || !count(1)) return;
    for (const Json& item : value.array()) data(item);
    for (const auto& [key, item] : value.object()) data(item);
  }

  bool count(size_t more) {
    num_nodes_ += more;
    if (num_nodes_ > kMaxSchemaNodes && !fault_) {
      note("schema", fmt::format("at most {} objects, arrays and values", kMaxSchemaNodes), "more");
    }
    return !fault_;
  }

  void note(const std::string& path, std::string_view expected, std::string_view found) {
    fault_ = fmt::format("{}: expected {}, found {}", path, expected, found);
  }

  const bool is_lenient_;
  size_t num_nodes_ = 0, num_enum_values_ = 0;
  std::optional<std::string> fault_;
};

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

std::optional<std::string> find_schema_fault(std::string_view schema, bool is_lenient) {
  SchemaWalk walk(is_lenient);
  walk.walk(Json::parse_exact(schema, "schema"), "schema");
  return walk.fault();
}

std::optional<std::string> find_pattern_fault(std::string_view pattern) {
  if (PatternCount(pattern).count() <= kMaxPatternRepeats) return std::nullopt;
  return fmt::format("expected a regular expression of at most {} characters, repeated ones counted, found more",
                     kMaxPatternRepeats);
}

}  // namespace tessera::text
