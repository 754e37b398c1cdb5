// SPDX-License-Identifier: Apache-2.0
#include "base/json.h"

#include <fmt/format.h>
#include <simdjson.h>

#include <cmath>
#include <unordered_set>

#include "base/error.h"
#include "base/strings.h"

namespace tessera {

// Copies simdjson's tree, refusing duplicate keys on the way.
struct JsonBuilder {
  std::string_view where;

  Json build(simdjson::dom::element element, const std::string& path) const {
    using Type = simdjson::dom::element_type;
    Json out;
    switch (element.type()) {
      case Type::NULL_VALUE:
        break;
      case Type::BOOL:
        out.kind_ = Json::Kind::kBool;
        out.bool_ = bool(element);
        break;
      case Type::INT64:
        out.kind_ = Json::Kind::kInt;
        out.int_ = int64_t(element);
        break;
      case Type::UINT64:
        fail_data(where, path.empty() ? "value" : path, "an integer below 2^63", "a larger one");
      case Type::DOUBLE:
        out.kind_ = Json::Kind::kDouble;
        out.double_ = double(element);
        break;
      case Type::STRING:
        out.kind_ = Json::Kind::kString;
        out.string_ = std::string(std::string_view(element));
        break;
      case Type::ARRAY: {
        out.kind_ = Json::Kind::kArray;
        size_t index = 0;
        for (simdjson::dom::element child : simdjson::dom::array(element)) {
          out.array_.push_back(build(child, path));
          ++index;
        }
        break;
      }
      case Type::OBJECT:
        build_object(out, simdjson::dom::object(element), path);
        break;
    }
    return out;
  }

  void build_object(Json& out, simdjson::dom::object object, const std::string& path) const {
    out.kind_ = Json::Kind::kObject;
    std::unordered_set<std::string_view> seen;
    for (auto [key, child] : object) {
      if (!seen.insert(key).second) {
        fail_data(where, path.empty() ? "top level" : path, "every key once", fmt::format("key \"{}\" twice", key));
      }
      out.object_.emplace_back(std::string(key), build(child, std::string(key)));
    }
  }
};

Json Json::parse(std::string_view text, std::string_view where) {
  simdjson::dom::parser parser;
  simdjson::dom::element root;
  const simdjson::error_code error = parser.parse(simdjson::padded_string(text)).get(root);
  if (error == simdjson::MEMALLOC) throw std::bad_alloc();
  if (error) fail_data(where, "JSON", "one well-formed value", simdjson::error_message(error));
  return JsonBuilder{where}.build(root, "");
}

const Json* Json::find(std::string_view key) const {
  for (const Member& member : object_) {
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

JsonCursor JsonCursor::at(std::string_view key) const {
  if (value_->kind() != Json::Kind::kObject) fail_expected("an object");
  const std::string child_path = path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key);
  const Json* child = value_->find(key);
  if (child == nullptr) fail_data(file_, fmt::format("field {}", child_path), "a value", "nothing");
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
  fail_data(file_, path_.empty() ? "top level" : fmt::format("field {}", path_), expected, describe(*value_));
}

}  // namespace tessera
