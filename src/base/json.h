// SPDX-License-Identifier: Apache-2.0
#pragma once
// JSON that comes in: a strict reader (simdjson's DOM, UTF-8 checked, depth limited; duplicate keys refused) into a
// plain tree, and a cursor that knows its path so that errors name the field.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {

class Json {
 public:
  enum class Kind { kNull, kBool, kInt, kDouble, kString, kArray, kObject };
  using Member = std::pair<std::string, Json>;

  // Parses one document; `where` (a file name) opens the error message. Throws kDataLoss for anything that is not
  // exactly one JSON value, for duplicate keys, and for integers outside int64.
  static Json parse(std::string_view text, std::string_view where);

  Kind kind() const { return kind_; }
  bool boolean() const { return bool_; }
  int64_t integer() const { return int_; }
  double number() const { return kind_ == Kind::kInt ? static_cast<double>(int_) : double_; }
  const std::string& string() const { return string_; }
  const std::vector<Json>& array() const { return array_; }
  const std::vector<Member>& object() const { return object_; }
  const Json* find(std::string_view key) const;  // nullptr where absent, or where this is not an object

 private:
  friend struct JsonBuilder;
  Kind kind_ = Kind::kNull;
  bool bool_ = false;
  int64_t int_ = 0;
  double double_ = 0;
  std::string string_;
  std::vector<Json> array_;
  std::vector<Member> object_;  // in file order
};

// One line of JSON-like text describing a value for messages: its kind, and the value where it is short.
std::string describe(const Json& value);

// A place in a document. Reading the wrong kind throws kDataLoss: "FILE: field a.b[3]: expected ..., found ...".
class JsonCursor {
 public:
  JsonCursor(const Json& value, std::string file, std::string path = "")
      : value_(&value), file_(std::move(file)), path_(std::move(path)) {}

  const Json& value() const { return *value_; }
  const std::string& file() const { return file_; }
  const std::string& path() const { return path_; }
  bool is_null() const { return value_->kind() == Json::Kind::kNull; }

  JsonCursor at(std::string_view key) const;                        // required member; throws where absent
  std::optional<JsonCursor> find(std::string_view key) const;       // absent or null: nothing
  std::vector<JsonCursor> elements() const;                         // of an array
  std::vector<std::pair<std::string, JsonCursor>> members() const;  // of an object

  int64_t integer(int64_t min, int64_t max) const;  // inclusive bounds; 3.0 counts as 3
  double number(double min, double max) const;
  bool boolean() const;
  const std::string& string() const;
  [[noreturn]] void fail_expected(std::string_view expected) const;

 private:
  const Json* value_;
  std::string file_, path_;
};

}  // namespace tessera
