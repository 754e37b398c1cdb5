// SPDX-License-Identifier: Apache-2.0
#pragma once
// JSON that comes in: a strict reader (nlohmann's event parser: UTF-8 checked, no recursion; here depth and size are
// limited and duplicate keys refused) into a plain tree, a second reader with the rules of Python's json module, and a
// cursor that knows its path so that errors name the field.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.h"

namespace tessera {

class JsonMemberSink;

class Json {
 public:
  // kBigInt: an integer outside int64; only parse_python and parse_exact make it.
  enum class Kind { kNull, kBool, kInt, kBigInt, kDouble, kString, kArray, kObject };
  using Member = std::pair<std::string, Json>;

  // Values that one document may hold (kDefaultMaxValues: about 300 MB as a tree).
  static constexpr size_t kDefaultMaxValues = size_t{1} << 22;
  static constexpr size_t kMaxDepth = 64;
  static constexpr size_t kMaxKeys = size_t{1} << 14;  // of one object, for parse_exact

  // Parses one document; `where` (a file name) opens the error message. Throws kDataLoss for anything that is not
  // exactly one JSON value, for duplicate keys, for integers outside int64, and for more than `max_values` values.
  static Json parse(std::string_view text, std::string_view where, size_t max_values = kDefaultMaxValues);

  // For documents too large for a tree: the text must be one object, whose members are handed over one by one, in
  // order. Each may hold `max_values` values. Duplicate keys of the object itself are refused too.
  static void parse_members(std::string_view text, std::string_view where, size_t max_values, JsonMemberSink& sink);

  // Parses one document as Python's json.loads does, for text that models were trained on: integers of any size (up to
  // 4300 digits, Python's own limit), NaN and Infinity, numbers too large for a double as infinity, and for a key that
  // comes twice the last value in the first place. Nesting ends at 512. A lone surrogate is refused: Python reads it,
  // and fails when the text is encoded. Throws kDataLoss naming the field, such as messages[3].content, and the byte.
  static Json parse_python(std::string_view text, std::string_view where);

  // Parses one document as strictly as parse, but keeps integers outside int64 as they are written, for requests whose
  // schemas go into a prompt. Numbers too large for a double are refused, and objects of more than kMaxKeys. Throws
  // kDataLoss as parse_python does.
  static Json parse_exact(std::string_view text, std::string_view where, size_t max_values = kDefaultMaxValues);

  Kind kind() const { return static_cast<Kind>(value_.index()); }
  // The value where it is of that kind; false, 0 and empty ones otherwise.
  bool boolean() const { return value_or<bool>(false); }
  int64_t integer() const { return value_or<int64_t>(0); }
  double number() const { return kind() == Kind::kInt ? static_cast<double>(integer()) : value_or<double>(0); }
  const std::string& string() const { return value_or_empty<std::string>(); }
  const std::string& big_integer() const { return value_or_empty<BigInteger>().digits; }  // with a sign perhaps
  const std::vector<Json>& array() const { return value_or_empty<std::vector<Json>>(); }
  const std::vector<Member>& object() const { return value_or_empty<std::vector<Member>>(); }
  const Json* find(std::string_view key) const;  // nullptr where absent, or where this is not an object

 private:
  friend class JsonEvents;
  friend class PythonJsonReader;
  struct BigInteger {
    std::string digits;
  };
  template <class T>
  T value_or(T otherwise) const {
    const T* value = std::get_if<T>(&value_);
    return value != nullptr ? *value : otherwise;
  }
  template <class T>
  const T& value_or_empty() const {
    static const T kEmpty{};
    const T* value = std::get_if<T>(&value_);
    return value != nullptr ? *value : kEmpty;
  }

  // In the order of Kind; an object's members are in file order.
  std::variant<std::monostate, bool, int64_t, BigInteger, double, std::string, std::vector<Json>, std::vector<Member>>
      value_;
};

// Receives the members of an object from Json::parse_members; what it throws ends the parsing.
class JsonMemberSink {
 public:
  virtual ~JsonMemberSink() = default;
  virtual void member(std::string&& key, Json&& value) = 0;
};

// One line of JSON-like text describing a value for messages: its kind, and the value where it is short.
std::string describe(const Json& value);

// What JsonCursor throws: a kDataLoss whose parts can be read, for answers that name the field.
class JsonFieldError : public Error {
 public:
  JsonFieldError(const std::string& message, std::string path) : Error(ErrorCode::kDataLoss, message), path_(path) {}
  const std::string& path() const { return path_; }  // a.b[3]; empty: the document itself

 private:
  std::string path_;
};

// A place in a document. Reading the wrong kind throws kDataLoss: "FILE: field a.b[3]: expected ..., found ...".
class JsonCursor {
 public:
  JsonCursor(const Json& value, std::string file, std::string path = "")
      : value_(&value), file_(std::move(file)), path_(std::move(path)) {}

  const Json& value() const { return *value_; }
  const std::string& file() const { return file_; }
  const std::string& path() const { return path_; }

  JsonCursor at(std::string_view key) const;                        // required member; throws where absent
  std::optional<JsonCursor> find(std::string_view key) const;       // absent or null: nothing
  std::vector<JsonCursor> elements() const;                         // of an array
  std::vector<std::pair<std::string, JsonCursor>> members() const;  // of an object

  int64_t integer(int64_t min, int64_t max) const;        // inclusive bounds; 3.0 counts as 3
  int64_t exact_integer(int64_t min, int64_t max) const;  // inclusive bounds; written without fraction and exponent
  double number(double min, double max) const;
  bool boolean() const;
  const std::string& string() const;
  [[noreturn]] void fail_expected(std::string_view expected) const;

 private:
  const Json* value_;
  std::string file_, path_;
};

}  // namespace tessera
