// SPDX-License-Identifier: Apache-2.0
#include "base/json.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "base/error.h"
#include "base/strings.h"

namespace tessera {

// Receives nlohmann's parse events and builds values; limits and duplicate keys are checked as they come, so that a
// hostile document is refused before it takes memory.
class JsonEvents {
 public:
  JsonEvents(std::string_view where, size_t max_values, JsonMemberSink* members)
      : where_(where), max_values_(max_values), members_(members) {}

  Json take_root() { return std::move(root_); }

  // The interface that nlohmann::json::sax_parse calls; true means: go on.
  bool null() { return add(Json{}); }
  bool boolean(bool value) { return add_value(value); }
  bool number_integer(int64_t value) { return add_value(value); }
  bool number_unsigned(uint64_t value) {
    if (value > static_cast<uint64_t>(INT64_MAX)) fail_here("an integer below 2^63", fmt::format("{}", value));
    return add_value(static_cast<int64_t>(value));
  }
  bool number_float(double value, const std::string& text) {
    // What has neither point nor exponent was an integer that no 64 bits hold.
    if (text.find_first_of(".eE") == std::string::npos) fail_here("an integer below 2^63", printable(text, 40));
    return add_value(value);
  }
  bool string(std::string& value) { return add_value(std::move(value)); }
  bool binary(std::vector<uint8_t>&) { return false; }  // never in text
  bool start_object(size_t) {
    open(std::vector<Json::Member>{});
    keys_.emplace_back();
    return true;
  }
  bool start_array(size_t) {
    if (members_ != nullptr && open_.empty()) fail_here("an object", "an array");
    open(std::vector<Json>{});
    return true;
  }
  bool key(std::string& name) {
    if (!keys_.back().insert(name).second) {
      fail_here("every key once", fmt::format("key \"{}\" twice", printable(name, 60)));
    }
    key_ = std::move(name);
    return true;
  }
  bool end_object() {
    keys_.pop_back();
    return close();
  }
  bool end_array() { return close(); }
  template <class Exception>
  bool parse_error(size_t position, const std::string&, const Exception&) {
    fail_data(where_, "JSON", "one well-formed value", fmt::format("an error at byte {}", position));
  }

 private:
  struct Level {
    Json value;
    std::string key;  // of this value in its parent
  };

  template <class T>
  bool add_value(T&& value) {
    Json json;
    json.value_ = std::forward<T>(value);
    return add(std::move(json));
  }

  template <class T>
  void open(T empty) {
    if (open_.size() >= Json::kMaxDepth) fail_here(fmt::format("at most {} levels", Json::kMaxDepth), "more");
    if (members_ == nullptr || !open_.empty()) count_value();
    Level level;
    level.value.value_ = std::move(empty);
    level.key = std::move(key_);
    open_.push_back(std::move(level));
  }

  bool close() {
    Level level = std::move(open_.back());
    open_.pop_back();
    key_ = std::move(level.key);
    return attach(std::move(level.value));
  }

  bool add(Json&& value) {
    if (members_ != nullptr && open_.empty()) fail_here("an object", describe(value));
    count_value();
    return attach(std::move(value));
  }

  bool attach(Json&& value) {
    if (open_.empty()) {
      root_ = std::move(value);
    } else if (auto* array = std::get_if<std::vector<Json>>(&open_.back().value.value_)) {
      array->push_back(std::move(value));
    } else if (members_ != nullptr && open_.size() == 1) {
      num_values_ = 0;
      members_->member(std::move(key_), std::move(value));
    } else {
      std::get<std::vector<Json::Member>>(open_.back().value.value_).emplace_back(std::move(key_), std::move(value));
    }
    return true;
  }

  void count_value() {
    if (++num_values_ > max_values_) fail_here(fmt::format("at most {} values", max_values_), "more");
  }

  [[noreturn]] void fail_here(const std::string& expected, const std::string& found) const {
    std::string path;
    for (size_t i = 1; i < open_.size(); ++i) append_step(path, open_[i - 1].value, open_[i].key);
    if (!open_.empty() && !key_.empty()) append_step(path, open_.back().value, key_);
    fail_data(where_, path.empty() ? "top level" : fmt::format("field {}", path), expected, found);
  }

  static void append_step(std::string& path, const Json& parent, const std::string& name) {
    if (parent.kind() == Json::Kind::kArray) {
      path += fmt::format("[{}]", parent.array().size());
    } else {
      path += (path.empty() ? "" : ".") + printable(name, 60);
    }
  }

  std::string_view where_;
  size_t max_values_, num_values_ = 0;
  JsonMemberSink* members_;  // null: one tree
  Json root_;
  std::string key_;                                    // of the value that comes next
  std::vector<Level> open_;                            // objects and arrays that have not ended
  std::vector<std::unordered_set<std::string>> keys_;  // of each open object
};

namespace {

void parse_events(std::string_view text, std::string_view where, JsonEvents& events) {
  // The parser would skip a byte order mark; JSON has none.
  if (text.starts_with("\xEF\xBB\xBF")) fail_data(where, "JSON", "text without a byte order mark", "one");
  // It would also take a zero byte as the end of the text.
  if (const size_t zero = text.find('\0'); zero != std::string_view::npos) {
    fail_data(where, "JSON", "one well-formed value", fmt::format("a zero byte at byte {}", zero));
  }
  nlohmann::json::sax_parse(text, &events);
}

}  // namespace

Json Json::parse(std::string_view text, std::string_view where, size_t max_values) {
  JsonEvents events(where, max_values, nullptr);
  parse_events(text, where, events);
  return events.take_root();
}

void Json::parse_members(std::string_view text, std::string_view where, size_t max_values, JsonMemberSink& sink) {
  JsonEvents events(where, max_values, &sink);
  parse_events(text, where, events);
}

const Json* Json::find(std::string_view key) const {
  for (const Member& member : object()) {
    if (member.first == key) return &member.second;
  }
  return nullptr;
}

std::string describe(const Json& value) {
  switch (value.kind()) {
    case Json::Kind::kNull:
      return "null";
    case Json::Kind::kBool:
      return value.boolean() ? "true" : "false";
    case Json::Kind::kInt:
      return fmt::format("{}", value.integer());
    case Json::Kind::kBigInt:
      return printable(value.big_integer(), 60);
    case Json::Kind::kDouble:
      return fmt::format("{}", value.number());
    case Json::Kind::kString:
      return fmt::format("\"{}\"", printable(value.string(), 60));
    case Json::Kind::kArray:
      return fmt::format("an array of {}", value.array().size());
    case Json::Kind::kObject:
      return fmt::format("an object of {} members", value.object().size());
  }
  return "nothing";
}

namespace {

[[noreturn]] void fail_field(const std::string& file, const std::string& path, std::string_view expected,
                             const std::string& found) {
  try {
    fail_data(file, path.empty() ? "top level" : fmt::format("field {}", path), expected, found);
  } catch (const Error& error) {
    throw JsonFieldError(error.what(), path);
  }
}

}  // namespace

JsonCursor JsonCursor::at(std::string_view key) const {
  if (value_->kind() != Json::Kind::kObject) fail_expected("an object");
  const std::string child_path = path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key);
  const Json* child = value_->find(key);
  if (child == nullptr) fail_field(file_, child_path, "a value", "nothing");
  return JsonCursor(*child, file_, child_path);
}

std::optional<JsonCursor> JsonCursor::find(std::string_view key) const {
  if (value_->kind() != Json::Kind::kObject) fail_expected("an object");
  const Json* child = value_->find(key);
  if (child == nullptr || child->kind() == Json::Kind::kNull) return std::nullopt;
  return at(key);
}

std::vector<JsonCursor> JsonCursor::elements() const {
  if (value_->kind() != Json::Kind::kArray) fail_expected("an array");
  std::vector<JsonCursor> out;
  out.reserve(value_->array().size());
  for (const Json& child : value_->array()) out.emplace_back(child, file_, fmt::format("{}[{}]", path_, out.size()));
  return out;
}

std::vector<std::pair<std::string, JsonCursor>> JsonCursor::members() const {
  if (value_->kind() != Json::Kind::kObject) fail_expected("an object");
  std::vector<std::pair<std::string, JsonCursor>> out;
  for (const Json::Member& member : value_->object()) {
    out.emplace_back(member.first,
                     JsonCursor(member.second, file_, path_.empty() ? member.first : path_ + "." + member.first));
  }
  return out;
}

int64_t JsonCursor::integer(int64_t min, int64_t max) const {
  int64_t found = value_->integer();
  bool is_whole = value_->kind() == Json::Kind::kInt;
  if (value_->kind() == Json::Kind::kDouble && std::abs(value_->number()) < 0x1p53 &&
      value_->number() == std::trunc(value_->number())) {
    found = static_cast<int64_t>(value_->number());
    is_whole = true;
  }
  if (!is_whole || found < min || found > max) fail_expected(fmt::format("an integer from {} to {}", min, max));
  return found;
}

int64_t JsonCursor::exact_integer(int64_t min, int64_t max) const {
  const bool is_integer = value_->kind() == Json::Kind::kInt;
  if (!is_integer || value_->integer() < min || value_->integer() > max) {
    fail_expected(fmt::format("an integer from {} to {}", min, max));
  }
  return value_->integer();
}

double JsonCursor::number(double min, double max) const {
  const bool is_number = value_->kind() == Json::Kind::kInt || value_->kind() == Json::Kind::kDouble;
  if (!is_number || !(value_->number() >= min && value_->number() <= max)) {
    fail_expected(fmt::format("a number from {} to {}", min, max));
  }
  return value_->number();
}

bool JsonCursor::boolean() const {
  if (value_->kind() != Json::Kind::kBool) fail_expected("true or false");
  return value_->boolean();
}

const std::string& JsonCursor::string() const {
  if (value_->kind() != Json::Kind::kString) fail_expected("a string");
  return value_->string();
}

void JsonCursor::fail_expected(std::string_view expected) const {
  fail_field(file_, path_, expected, describe(*value_));
}

}  // namespace tessera
