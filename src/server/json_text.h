// SPDX-License-Identifier: Apache-2.0
#pragma once
// JSON that goes out. A value is its text from the first, and objects and arrays are texts that grow: nothing is held
// as a tree, whose end would have to walk it. (nlohmann::json allocates to do that, in a destructor, where memory that
// has ended ends the process.) Text that is JSON already goes in as it is: parsed and written again, integers of more
// than 64 bits would change or be refused.
#include <concepts>
#include <cstddef>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

namespace tessera::server {

class JsonObject;
class JsonArray;

// One value: null, a boolean, a number, a string, or what an object or array holds so far. Invalid UTF-8, which JSON
// cannot hold, becomes U+FFFD; numbers that JSON does not have, null.
class JsonText {
 public:
  JsonText(std::nullptr_t = nullptr) : text_("null") {}
  template <std::integral T>
  JsonText(T value) : text_(std::to_string(value)) {}
  JsonText(bool value) : text_(value ? "true" : "false") {}
  JsonText(double value);
  // A template, so that braces are never taken for the two iterators of a string.
  template <class T>
  requires std::convertible_to<const T&, std::string_view> JsonText(const T& text) : text_(quoted(text)) {}
  JsonText(const JsonObject& object);
  JsonText(const JsonArray& array);
  // `text` is JSON already.
  static JsonText raw(std::string text);
  // null for "".
  static JsonText or_null(std::string_view text) { return text.empty() ? JsonText() : JsonText(text); }

  const std::string& text() const& { return text_; }
  std::string text() && { return std::move(text_); }

 private:
  static std::string quoted(std::string_view text);

  std::string text_;
};

struct JsonMember {
  std::string_view name;
  JsonText value;
};

// Members in the order in which they are added. The caller gives each name once.
class JsonObject {
 public:
  JsonObject() = default;
  JsonObject(std::initializer_list<JsonMember> members);

  JsonObject& add(std::string_view name, const JsonText& value);
  // Those of `object`, which is JSON text.
  JsonObject& add_members_of(std::string_view object);
  bool is_empty() const { return members_.empty(); }
  std::string text() const { return "{" + members_ + "}"; }

 private:
  std::string members_;
};

class JsonArray {
 public:
  JsonArray() = default;
  // An array of one array is made with add(): these braces would copy it.
  JsonArray(std::initializer_list<JsonText> values);

  JsonArray& add(const JsonText& value);
  size_t size() const { return size_; }
  bool is_empty() const { return size_ == 0; }
  std::string text() const { return "[" + values_ + "]"; }

 private:
  std::string values_;
  size_t size_ = 0;
};

}  // namespace tessera::server
