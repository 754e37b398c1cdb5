// SPDX-License-Identifier: Apache-2.0
#include "server/json_text.h"

#include <fmt/format.h>

#include <cmath>
#include <iterator>

#include "base/strings.h"

namespace tessera::server {

namespace {

void append_escaped(std::string& out, char c) {
  switch (c) {
    case '"':
    case '\\':
      out += '\\';
      out += c;
      return;
    case '\b':
      out += "\\b";
      return;
    case '\f':
      out += "\\f";
      return;
    case '\n':
      out += "\\n";
      return;
    case '\r':
      out += "\\r";
      return;
    case '\t':
      out += "\\t";
      return;
    default:
      break;
  }
  if (static_cast<unsigned char>(c) < 0x20) {
    fmt::format_to(std::back_inserter(out), "\\u{:04x}", static_cast<unsigned char>(c));
  } else {
    out += c;
  }
}

}  // namespace

JsonText::JsonText(double value) : text_(std::isfinite(value) ? fmt::format("{}", value) : "null") {
  // Readers that tell integers from other numbers see what it is.
  if (std::isfinite(value) && text_.find_first_of(".e") == std::string::npos) text_ += ".0";
}

JsonText::JsonText(const JsonObject& object) : text_(object.text()) {}
JsonText::JsonText(const JsonArray& array) : text_(array.text()) {}

JsonText JsonText::raw(std::string text) {
  JsonText out;
  out.text_ = std::move(text);
  return out;
}

std::string JsonText::quoted(std::string_view text) {
  if (!is_valid_utf8(text)) return quoted(replace_invalid_utf8(text));
  std::string out;
  out.reserve(text.size() + 2);
  out += '"';
  for (const char c : text) append_escaped(out, c);
  out += '"';
  return out;
}

JsonObject::JsonObject(std::initializer_list<JsonMember> members) {
  for (const JsonMember& member : members) add(member.name, member.value);
}

JsonObject& JsonObject::add(std::string_view name, const JsonText& value) {
  if (!members_.empty()) members_ += ',';
  members_ += JsonText(name).text();
  members_ += ':';
  members_ += value.text();
  return *this;
}

JsonObject& JsonObject::add_members_of(std::string_view object) {
  object.remove_prefix(object.find('{') + 1);
  object.remove_suffix(object.size() - object.rfind('}'));
  if (object.find_first_not_of(" \t\n\r") == std::string_view::npos) return *this;
  if (!members_.empty()) members_ += ',';
  members_ += object;
  return *this;
}

JsonArray::JsonArray(std::initializer_list<JsonText> values) {
  for (const JsonText& value : values) add(value);
}

JsonArray& JsonArray::add(const JsonText& value) {
  if (size_++ > 0) values_ += ',';
  values_ += value.text();
  return *this;
}

}  // namespace tessera::server
