// SPDX-License-Identifier: Apache-2.0
#include "text/grammar/schema_fault.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "text/grammar/schema_text.h"

namespace tessera::text {
namespace {

using ::testing::HasSubstr;

std::string fault(const std::string& schema, SchemaUse use = SchemaUse::kAnswer) {
  return find_schema_fault(schema, use).value_or("");
}

TEST(SchemaFault, KeywordsThatNoGrammarHoldsAreRefusedWithTheirPlace) {
  EXPECT_THAT(fault(R"({"properties": {"a": {"not": {"type": "string"}}}})"), HasSubstr("schema.properties.a.not"));
  EXPECT_THAT(fault(R"({"items": {"uniqueItems": true}})"), HasSubstr("schema.items.uniqueItems"));
  EXPECT_EQ(fault(R"({"items": {"uniqueItems": false}, "properties": {"if": {"type": "string"}}})"), "");
  EXPECT_EQ(fault(R"({"const": {"not": 1}, "default": {"if": 2}})"), "");
  EXPECT_EQ(fault(R"({"not": {}})", SchemaUse::kTool), "");
  EXPECT_THAT(fault(R"({"allOf": [{"type": "null"}, {"type": "null"}]})"),
              HasSubstr("schema.allOf: expected one schema"));
}

// The compiler would not look at these.
TEST(SchemaFault, KeywordsThatWouldBeLostAreRefusedWithTheirPlace) {
  EXPECT_THAT(fault(R"({"type": "object", "properties": {"a": {"type": "null"}}, "anyOf": [{"type": "object"}]})"),
              HasSubstr("schema.properties: expected nothing that holds values beside anyOf"));
  EXPECT_THAT(fault(R"({"items": {"$ref": "#/$defs/a", "maxLength": 3}, "$defs": {"a": {"type": "string"}}})"),
              HasSubstr("schema.items.maxLength"));
  EXPECT_THAT(fault(R"({"anyOf": [{"type": "object"}], "additionalProperties": false})"),
              HasSubstr("schema.additionalProperties"));
  EXPECT_EQ(fault(R"({"anyOf": [{"type": "object"}], "additionalProperties": true})"), "");
  EXPECT_THAT(fault(R"({"pattern": "^x"})"), HasSubstr("schema.pattern: expected \"type\" beside it"));
  EXPECT_THAT(fault(R"({"type": "object", "properties": {"a": {}}, "patternProperties": {"^b": {}}})"),
              HasSubstr("schema.patternProperties: expected no properties beside it"));
  EXPECT_THAT(fault(R"({"type": "object", "properties": {"a": {}}, "propertyNames": {"type": "string"}})"),
              HasSubstr("schema.propertyNames"));
  EXPECT_THAT(fault(R"({"type": "object", "patternProperties": {"^b": {}, "^a": {}}})"), HasSubstr("one pattern"));
}

TEST(SchemaFault, TypesBesideAnythingElseMustSayTheSame) {
  EXPECT_EQ(fault(R"({"type": "string", "enum": ["a", "b"], "description": "one of two"})"), "");
  EXPECT_EQ(fault(R"({"type": ["integer", "null"], "enum": [1, 2.0, null]})"), "");
  EXPECT_EQ(fault(R"({"type": "number", "const": 3})"), "");
  EXPECT_EQ(
      fault(
          R"({"type": "object", "anyOf": [{"$ref": "#/$defs/a"}, {"type": "object"}], "$defs": {"a": {"type": "object"}}})"),
      "");
  EXPECT_EQ(fault(R"({"type": "integer", "enum": [1, "a"]})"),
            "schema.enum[1]: expected a value of the type beside it, found \"a\"");
  EXPECT_THAT(fault(R"({"type": "string", "const": 5})"), HasSubstr("schema.type: expected no other types than const"));
  EXPECT_THAT(fault(R"({"type": "integer", "const": 2.5})"), HasSubstr("schema.type"));
  EXPECT_THAT(fault(R"({"type": "integer", "anyOf": [{"type": "integer"}, {"type": "string"}]})"),
              HasSubstr("schema.type: expected no other types than anyOf says, found \"integer\""));
  EXPECT_THAT(fault(R"({"type": "string", "$ref": "#/$defs/a", "$defs": {"a": {"title": "any"}}})"),
              HasSubstr("schema.type"));
  // References that lead nowhere, or in a circle.
  EXPECT_THAT(fault(R"({"type": "string", "$ref": "#/$defs/b"})"), HasSubstr("schema.type"));
  EXPECT_THAT(fault(R"({"type": "string", "$ref": "#"})"), HasSubstr("schema.type"));
}

TEST(SchemaFault, NamesThatAreRequiredHaveASchema) {
  EXPECT_EQ(fault(R"({"type": "object", "properties": {"a": {}}, "required": ["a"]})"), "");
  EXPECT_EQ(fault(R"({"type": "object", "required": ["a"]})"),
            "schema.required[0]: expected a name that \"properties\" beside it has, found \"a\"");
  EXPECT_THAT(fault(R"({"type": "object", "properties": {"a": {}}, "required": ["a", "b"]})"),
              HasSubstr("required[1]"));
  EXPECT_EQ(fault(R"({"type": "object", "required": ["a"]})", SchemaUse::kTool), "");
}

TEST(SchemaFault, ValuesOfTheWrongKindAreNamed) {
  EXPECT_THAT(fault(R"({"anyOf": []})"), HasSubstr("schema.anyOf: expected an array of at least one"));
  EXPECT_THAT(fault(R"({"enum": []})"), HasSubstr("schema.enum"));
  EXPECT_THAT(fault(R"({"type": "text"})"), HasSubstr("schema.type: expected a type of JSON Schema"));
  EXPECT_THAT(fault(R"({"type": []})"), HasSubstr("schema.type"));
  EXPECT_THAT(fault(R"({"type": "string", "format": 5})"), HasSubstr("schema.format: expected a string, found 5"));
  EXPECT_THAT(fault(R"({"type": "object", "required": [1]})"), HasSubstr("schema.required"));
  EXPECT_THAT(fault(R"({"type": "string", "minLength": -1})"), HasSubstr("schema.minLength"));
  EXPECT_THAT(fault(R"({"type": "array", "items": 5})"), HasSubstr("schema.items: expected a schema"));
  EXPECT_THAT(fault(R"({"type": "integer", "minimum": 12345678901234567890})"), HasSubstr("schema.minimum"));
  EXPECT_THAT(fault(R"({"const": [12345678901234567890]})"),
              HasSubstr("schema.const: expected integers of at most 64 bits"));
  EXPECT_EQ(fault(R"({"type": "null", "default": 12345678901234567890})"), "");
}

TEST(SchemaFault, OtherNamesMayComeTwice) {
  EXPECT_EQ(fault(R"({"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1})"), "");
  EXPECT_THAT(fault(R"({"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2})"),
              HasSubstr("schema.minProperties: expected at most 1"));
  EXPECT_THAT(fault(R"({"type": "object", "propertyNames": {"type": "integer"}})"),
              HasSubstr("a schema of strings alone"));
  const std::string open = R"({"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": true})";
  EXPECT_EQ(fault(open), "");
  EXPECT_THAT(fault(open, SchemaUse::kStrictTool), HasSubstr("schema.additionalProperties: expected false"));
}

TEST(SchemaFault, RangesHaveNumbersOfSixDecimals) {
  EXPECT_EQ(fault(R"({"type": "number", "minimum": -0.1, "exclusiveMaximum": 1e15})"), "");
  EXPECT_EQ(fault(R"({"type": "number", "exclusiveMinimum": 0.1, "exclusiveMaximum": 0.100002})"), "");
  EXPECT_THAT(fault(R"({"type": "number", "minimum": 1e-7})"),
              HasSubstr("schema.minimum: expected a number of at most six"));
  EXPECT_THAT(fault(R"({"type": "number", "exclusiveMinimum": 0.1, "exclusiveMaximum": 0.100001})"),
              HasSubstr("schema: expected bounds"));
  EXPECT_EQ(fault(R"({"type": "integer", "minimum": 0, "exclusiveMaximum": 1})"), "");
}

TEST(SchemaFault, BoundsAreNamed) {
  std::string values = R"({"enum": [)";
  for (size_t i = 0; i <= kMaxEnumValues; ++i) values += std::to_string(i) + ",";
  values.back() = ']';
  EXPECT_THAT(fault(values + "}"), HasSubstr("schema.enum: expected at most 4096"));
  EXPECT_THAT(fault(R"({"type": "string", "maxLength": 1000000})", SchemaUse::kTool),
              HasSubstr("schema.maxLength: expected at most 4096, found 1000000"));
  EXPECT_THAT(fault(R"({"patternProperties": {"(a{99}){99}": {}}})", SchemaUse::kTool),
              HasSubstr("at most 4096 characters"));
  const std::string lookahead = R"x({"type": "string", "pattern": "(?=a)"})x";
  EXPECT_THAT(fault(R"({"items": )" + lookahead + "}"), HasSubstr("schema.items.pattern: regular expression, byte 1"));
  EXPECT_EQ(fault(lookahead, SchemaUse::kTool), "");
  const std::string line_end = R"({"type": "string", "pattern": "\n"})";
  EXPECT_EQ(fault(line_end), "");
  EXPECT_THAT(fault(line_end, SchemaUse::kStrictTool), HasSubstr("schema.pattern: "));
}

TEST(SchemaText, HasCanonicalPatternsAndNoFormatBesideThem) {
  const auto text = [](const std::string& schema) { return schema_for_compiler(schema, PatternUse::kJsonString); };
  EXPECT_EQ(text(R"({"type":"string","format":"uuid"})"), R"({"type":"string","format":"uuid"})");
  EXPECT_EQ(text(R"({"items":{"format":"uuid","pattern":"a","maxLength":12}})"),
            R"({"items": {"pattern": "\\u{61}", "maxLength": 12}})");
  EXPECT_EQ(text(R"x({"patternProperties": {"^a": {"pattern": "(?=a)"}, "(?=a)": true}})x"),
            R"({"patternProperties": {"\\u{61}": {}}})");
  // Names and data are no keywords.
  const std::string names =
      R"({"properties": {"format": {"type": "string"}, "pattern": {"const": {"format": "a", "pattern": "b"}}}})";
  EXPECT_EQ(text(names), names);
}

}  // namespace
}  // namespace tessera::text
