// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a request body may be, as data: one description that bodies are checked against and that /openapi.json is
// written from, so that the document says exactly what is taken. Fields that a schema does not name are ignored.
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace tessera::server {

struct Field;

struct Schema {
  enum class Kind {
    kAny,      // any value, null too
    kNull,     // null alone, where is_nullable
    kBoolean,  //
    kInteger,  // from least to most; 3.0 counts as 3
    kNumber,   // from minimum to maximum
    kString,   // min_length to max_length code points, all of them in `characters` if that is set; or one of values
    kArray,    // min_length to max_length of choices[0]
    kObject,   // fields
    kMap,      // an object of min_length to max_length keys, with values as choices[0]
    kEither,   // one of choices, which differ in their JSON type (arrays: in that of their items)
    kTagged,   // objects, told apart by the string at `tag`: values[i] goes with choices[i]
  };

  Kind kind = Kind::kAny;
  bool is_nullable = false;
  // Other values than these would have to be honoured, and are not: errors say unsupported.
  bool is_unsupported = false;
  int64_t least = 0, most = 0;
  double minimum = 0, maximum = 0;
  size_t max_bytes = std::numeric_limits<size_t>::max();  // kAny, kObject, kMap: as JSON text, about; kString: in UTF-8
  std::string_view characters;  // kString, keys of kMap: a class as in regular expressions, such as a-z0-9_
  size_t min_length = 0, max_length = std::numeric_limits<size_t>::max();
  std::vector<std::string> values;
  std::vector<Field> fields;
  std::vector<Schema> choices;
  std::string tag;
  std::string tag_default;  // of values, where the tag is missing or null; "": it must be there

  // A copy that takes null too.
  Schema or_null() const;
};

struct Field {
  std::string name;
  Schema schema;
  bool is_required = false;
};

// The kinds above. Bounds are inclusive.
Schema any_value(size_t max_bytes);
// An object of any members.
Schema any_object(size_t max_bytes);
Schema boolean();
Schema integer(int64_t minimum, int64_t maximum);
Schema number(double minimum, double maximum);
Schema string(size_t max_length, size_t min_length = 0);
// A string that is bounded in bytes of UTF-8, where its bytes are what has to be kept.
Schema text_of(size_t max_bytes, size_t min_length = 0);
// 1 to max_length of the letters, digits and marks that names of functions have.
Schema name(size_t max_length);
Schema one_of(std::vector<std::string> values);
Schema array(Schema items, size_t max_length, size_t min_length = 0);
Schema object(std::vector<Field> fields);
Schema map(Schema values, size_t max_length);
Schema either(std::vector<Schema> choices);
struct Tagged {
  std::string value;
  std::vector<Field> fields;  // beside the tag
};
Schema tagged(std::string_view tag, std::vector<Tagged> choices, std::string_view tag_default = "");

Field required(std::string_view name, Schema schema);
Field optional(std::string_view name, Schema schema);
// A field that is known, has a meaning, and is not honoured: only values that mean what is done anyway are taken.
// never: null. The others: null or such a value.
Field never(std::string_view name);
Field only_empty(std::string_view name);
Field only_boolean(std::string_view name, bool value);
Field only_number(std::string_view name, double value);
Field only_one_of(std::string_view name, std::vector<std::string> values);

// Throws RequestError naming the first field that departs from the schema: missing_required_parameter,
// unsupported_parameter or invalid_value. Recursion is bounded by the nesting of the value.
void check(const Json& value, const Schema& schema);

// Names of the body's own fields that the schema does not know, for a log line; at most 8, each made printable.
std::vector<std::string> unknown_fields(const Json& body, const Schema& schema);

// The schema as a JSON Schema (2020-12) document, which OpenAPI 3.1 embeds.
std::string json_schema(const Schema& schema);

// Bytes of the value as compact JSON text, about: what any_value bounds.
size_t json_size(const Json& value);

}  // namespace tessera::server
