// SPDX-License-Identifier: Apache-2.0
#include "server/schema.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/strings.h"
#include "server/api_error.h"

namespace tessera::server {

namespace {

constexpr size_t kNoBound = std::numeric_limits<size_t>::max();

// The way to a value, kept on the stack; written out only for an error.
struct Path {
  const Path* parent;
  std::string_view key;  // of an object
  size_t index;          // of an array, where key is null

  std::string to_string() const {
    if (parent == nullptr) return "";
    const std::string front = parent->to_string();
    if (key.data() == nullptr) return fmt::format("{}[{}]", front, index);
    return front.empty() ? std::string(key) : fmt::format("{}.{}", front, key);
  }
};

std::string listed(const std::vector<std::string>& values) {
  return fmt::format("\"{}\"", fmt::join(values, "\", \""));
}

// The schema in words.
std::string expected(const Schema& schema) {
  std::string words;
  switch (schema.kind) {
    case Schema::Kind::kAny:
      words = fmt::format("a value of at most {} bytes", schema.max_bytes);
      break;
    case Schema::Kind::kNull:
      return "no value: it is not supported";
    case Schema::Kind::kBoolean:
      words = schema.is_unsupported ? (schema.least == 0 ? "false" : "true") : "true or false";
      break;
    case Schema::Kind::kInteger:
      words = schema.least == schema.most ? fmt::format("{}", schema.least)
                                          : fmt::format("an integer from {} to {}", schema.least, schema.most);
      break;
    case Schema::Kind::kNumber:
      words = schema.minimum == schema.maximum ? fmt::format("{}", schema.minimum)
                                               : fmt::format("a number from {} to {}", schema.minimum, schema.maximum);
      break;
    case Schema::Kind::kString:
      words = schema.values.empty() ? fmt::format("a string of {} to {} {}", schema.min_length, schema.max_length,
                                                  schema.max_bytes == kNoBound ? "characters" : "bytes")
                                    : listed(schema.values);
      if (!schema.characters.empty()) words += fmt::format(" of {}", schema.characters);
      break;
    case Schema::Kind::kArray:
      words = fmt::format("an array of {} to {}", schema.min_length, schema.max_length);
      break;
    case Schema::Kind::kTagged:
    case Schema::Kind::kObject:
    case Schema::Kind::kMap:
      words = "an object";
      if (schema.max_length < kNoBound) words += fmt::format(" of at most {} members", schema.max_length);
      if (schema.max_bytes < kNoBound) words += fmt::format(" of at most {} bytes", schema.max_bytes);
      break;
    case Schema::Kind::kEither:
      for (const Schema& choice : schema.choices) words += (words.empty() ? "" : ", or ") + expected(choice);
      break;
  }
  return schema.is_nullable && !schema.is_unsupported ? words + " or null" : words;
}

[[noreturn]] void fail_at(const Path& path, const Schema& schema, const Json& value) {
  fail_field(schema.is_unsupported ? kUnsupported : kInvalidValue, path.to_string(), expected(schema), describe(value));
}

size_t num_code_points(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

bool is_within(const Schema& schema, size_t length) {
  return length >= schema.min_length && length <= schema.max_length;
}

bool is_small_enough(const Schema& schema, const Json& value) {
  return schema.max_bytes == kNoBound || json_size(value) <= schema.max_bytes;
}

bool is_integer_within(const Json& value, int64_t least, int64_t most) {
  const bool is_whole = value.kind() == Json::Kind::kDouble && value.number() == std::trunc(value.number()) &&
                        std::abs(value.number()) < 0x1p53;
  if (value.kind() != Json::Kind::kInt && !is_whole) return false;
  const int64_t found = is_whole ? static_cast<int64_t>(value.number()) : value.integer();
  return found >= least && found <= most;
}

// Whether a character is in a class such as a-z0-9_ (ranges of ASCII; a - at the end stands for itself).
bool is_in_class(char c, std::string_view characters) {
  for (size_t i = 0; i < characters.size(); ++i) {
    const bool is_range = i + 2 < characters.size() && characters[i + 1] == '-';
    if (is_range ? c >= characters[i] && c <= characters[i + 2] : c == characters[i]) return true;
    if (is_range) i += 2;
  }
  return false;
}

// Whether all characters are in the class; an empty class holds every character.
bool is_of_class(const std::string& text, std::string_view characters) {
  return characters.empty() ||
         (!text.empty() && std::all_of(text.begin(), text.end(), [&](char c) { return is_in_class(c, characters); }));
}

bool has_string(const Schema& schema, const std::string& text) {
  if (!schema.values.empty()) {
    return std::find(schema.values.begin(), schema.values.end(), text) != schema.values.end();
  }
  return text.size() <= schema.max_bytes && is_within(schema, num_code_points(text)) &&
         is_of_class(text, schema.characters);
}

// Whether the value has the schema's JSON type; for arrays also whether the first item has that of its items.
bool has_type(const Json& value, const Schema& schema) {
  const Json::Kind kind = value.kind();
  if (kind == Json::Kind::kNull) return schema.is_nullable || schema.kind == Schema::Kind::kAny;
  switch (schema.kind) {
    case Schema::Kind::kAny:
      return true;
    case Schema::Kind::kNull:
      return false;
    case Schema::Kind::kBoolean:
      return kind == Json::Kind::kBool;
    case Schema::Kind::kInteger:
    case Schema::Kind::kNumber:
      return kind == Json::Kind::kInt || kind == Json::Kind::kBigInt || kind == Json::Kind::kDouble;
    case Schema::Kind::kString:
      return kind == Json::Kind::kString;
    case Schema::Kind::kArray:
      return kind == Json::Kind::kArray &&
             (value.array().empty() || has_type(value.array().front(), schema.choices.front()));
    case Schema::Kind::kObject:
    case Schema::Kind::kMap:
    case Schema::Kind::kTagged:
      return kind == Json::Kind::kObject;
    case Schema::Kind::kEither:
      return std::any_of(schema.choices.begin(), schema.choices.end(),
                         [&](const Schema& choice) { return has_type(value, choice); });
  }
  return false;
}

void check_at(const Json& value, const Schema& schema, const Path& path);

void check_fields(const Json& value, const std::vector<Field>& fields, const Path& path) {
  for (const Field& field : fields) {
    const Path here{&path, field.name, 0};
    const Json* member = value.find(field.name);
    if (member != nullptr) {
      check_at(*member, field.schema, here);
    } else if (field.is_required) {
      fail_field(kMissingField, here.to_string(), expected(field.schema), "nothing");
    }
  }
}

void check_tagged(const Json& value, const Schema& schema, const Path& path) {
  const Path here{&path, schema.tag, 0};
  const Json* found = value.find(schema.tag);
  if (found != nullptr && found->kind() == Json::Kind::kNull && !schema.tag_default.empty()) found = nullptr;
  if (found == nullptr && schema.tag_default.empty()) {
    fail_field(kMissingField, here.to_string(), listed(schema.values), "nothing");
  }
  const std::string& name = found == nullptr ? schema.tag_default : found->string();
  const auto place = std::find(schema.values.begin(), schema.values.end(), name);
  const bool is_string = found == nullptr || found->kind() == Json::Kind::kString;
  if (!is_string || place == schema.values.end()) {
    fail_field(kInvalidValue, here.to_string(), listed(schema.values), describe(*found));
  }
  check_fields(value, schema.choices[static_cast<size_t>(place - schema.values.begin())].fields, path);
}

void check_at(const Json& value, const Schema& schema, const Path& path) {
  if (value.kind() == Json::Kind::kNull && schema.is_nullable) return;
  if (!has_type(value, schema)) {
    // Told by the first item: then it is the item that is wrong, unless another choice might have been meant.
    if (schema.kind == Schema::Kind::kArray && value.kind() == Json::Kind::kArray) {
      return check_at(value.array().front(), schema.choices.front(), {&path, std::string_view(), 0});
    }
    fail_at(path, schema, value);
  }
  bool is_good = true;
  switch (schema.kind) {
    case Schema::Kind::kNull:
      break;
    case Schema::Kind::kAny:
      is_good = is_small_enough(schema, value);
      break;
    case Schema::Kind::kBoolean:
      is_good = !schema.is_unsupported || value.boolean() == (schema.least != 0);
      break;
    case Schema::Kind::kInteger:
      is_good = is_integer_within(value, schema.least, schema.most);
      break;
    case Schema::Kind::kNumber:
      is_good =
          value.kind() != Json::Kind::kBigInt && value.number() >= schema.minimum && value.number() <= schema.maximum;
      break;
    case Schema::Kind::kString:
      is_good = has_string(schema, value.string());
      break;
    case Schema::Kind::kArray:
      is_good = is_within(schema, value.array().size());
      break;
    case Schema::Kind::kMap:
      is_good = is_within(schema, value.object().size()) && is_small_enough(schema, value);
      break;
    case Schema::Kind::kObject:
      check_fields(value, schema.fields, path);
      is_good = is_small_enough(schema, value);
      break;
    case Schema::Kind::kTagged:
      return check_tagged(value, schema, path);
    case Schema::Kind::kEither:
      return check_at(value,
                      *std::find_if(schema.choices.begin(), schema.choices.end(),
                                    [&](const Schema& choice) { return has_type(value, choice); }),
                      path);
  }
  if (!is_good) fail_at(path, schema, value);
  if (schema.kind == Schema::Kind::kArray) {
    for (size_t i = 0; i < value.array().size(); ++i) {
      check_at(value.array()[i], schema.choices.front(), {&path, std::string_view(), i});
    }
  } else if (schema.kind == Schema::Kind::kMap) {
    for (const auto& [key, member] : value.object()) {
      const Path here{&path, key, 0};
      if (!is_of_class(key, schema.characters)) {
        fail_field(kInvalidValue, here.to_string(), fmt::format("a key of {}", schema.characters), "another");
      }
      check_at(member, schema.choices.front(), here);
    }
  }
}

Schema of_kind(Schema::Kind kind) {
  Schema schema;
  schema.kind = kind;
  return schema;
}

Field unsupported(std::string_view name, Schema schema) {
  schema.is_nullable = true;
  schema.is_unsupported = true;
  return {std::string(name), std::move(schema), false};
}

}  // namespace

Schema Schema::or_null() const {
  Schema copy = *this;
  copy.is_nullable = true;
  return copy;
}

Schema any_value(size_t max_bytes) {
  Schema schema = of_kind(Schema::Kind::kAny);
  schema.max_bytes = max_bytes;
  return schema;
}

Schema any_object(size_t max_bytes) {
  Schema schema = map(any_value(kNoBound), kNoBound);
  schema.max_bytes = max_bytes;
  return schema;
}

Schema boolean() {
  return of_kind(Schema::Kind::kBoolean);
}

Schema integer(int64_t minimum, int64_t maximum) {
  Schema schema = of_kind(Schema::Kind::kInteger);
  schema.least = minimum;
  schema.most = maximum;
  return schema;
}

Schema number(double minimum, double maximum) {
  Schema schema = of_kind(Schema::Kind::kNumber);
  schema.minimum = minimum;
  schema.maximum = maximum;
  return schema;
}

Schema string(size_t max_length, size_t min_length) {
  Schema schema = of_kind(Schema::Kind::kString);
  schema.max_length = max_length;
  schema.min_length = min_length;
  return schema;
}

Schema text_of(size_t max_bytes, size_t min_length) {
  Schema schema = string(max_bytes, min_length);
  schema.max_bytes = max_bytes;
  return schema;
}

Schema name(size_t max_length) {
  Schema schema = string(max_length, 1);
  schema.characters = "a-zA-Z0-9_.-";
  return schema;
}

Schema one_of(std::vector<std::string> values) {
  Schema schema = of_kind(Schema::Kind::kString);
  schema.values = std::move(values);
  return schema;
}

Schema array(Schema items, size_t max_length, size_t min_length) {
  Schema schema = of_kind(Schema::Kind::kArray);
  schema.choices.push_back(std::move(items));
  schema.max_length = max_length;
  schema.min_length = min_length;
  return schema;
}

Schema object(std::vector<Field> fields) {
  Schema schema = of_kind(Schema::Kind::kObject);
  schema.fields = std::move(fields);
  return schema;
}

Schema map(Schema values, size_t max_length) {
  Schema schema = of_kind(Schema::Kind::kMap);
  schema.choices.push_back(std::move(values));
  schema.max_length = max_length;
  return schema;
}

Schema either(std::vector<Schema> choices) {
  Schema schema = of_kind(Schema::Kind::kEither);
  schema.choices = std::move(choices);
  return schema;
}

Schema tagged(std::string_view tag, std::vector<Tagged> choices, std::string_view tag_default) {
  Schema schema = of_kind(Schema::Kind::kTagged);
  schema.tag = tag;
  schema.tag_default = tag_default;
  for (Tagged& choice : choices) {
    schema.values.push_back(std::move(choice.value));
    schema.choices.push_back(object(std::move(choice.fields)));
  }
  return schema;
}

Field required(std::string_view name, Schema schema) {
  return {std::string(name), std::move(schema), true};
}

Field optional(std::string_view name, Schema schema) {
  return {std::string(name), std::move(schema), false};
}

Field never(std::string_view name) {
  return unsupported(name, of_kind(Schema::Kind::kNull));
}

Field only_empty(std::string_view name) {
  return unsupported(name, string(0));
}

Field only_boolean(std::string_view name, bool value) {
  Schema schema = boolean();
  schema.least = value ? 1 : 0;
  return unsupported(name, std::move(schema));
}

Field only_number(std::string_view name, double value) {
  return unsupported(name, number(value, value));
}

Field only_one_of(std::string_view name, std::vector<std::string> values) {
  return unsupported(name, one_of(std::move(values)));
}

void check(const Json& value, const Schema& schema) {
  check_at(value, schema, {nullptr, std::string_view(), 0});
}

std::vector<std::string> unknown_fields(const Json& body, const Schema& schema) {
  constexpr size_t kMost = 8, kNameBytes = 60;
  std::vector<std::string> names;
  for (const auto& [key, member] : body.object()) {
    const bool is_known =
        std::any_of(schema.fields.begin(), schema.fields.end(), [&](const Field& field) { return field.name == key; });
    if (!is_known && names.size() < kMost) names.push_back(printable(key, kNameBytes));
  }
  return names;
}

size_t json_size(const Json& value) {
  switch (value.kind()) {
    case Json::Kind::kNull:
    case Json::Kind::kBool:
      return 4;
    case Json::Kind::kInt:
    case Json::Kind::kDouble:
      return 8;
    case Json::Kind::kBigInt:
      return value.big_integer().size();
    case Json::Kind::kString:
      return value.string().size() + 2;
    case Json::Kind::kArray: {
      size_t size = 2;
      for (const Json& item : value.array()) size += json_size(item) + 1;
      return size;
    }
    case Json::Kind::kObject: {
      size_t size = 2;
      for (const auto& [key, member] : value.object()) size += key.size() + json_size(member) + 4;
      return size;
    }
  }
  return 0;
}

}  // namespace tessera::server
