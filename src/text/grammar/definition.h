// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a grammar is made of, as requests give it, and what of that is refused before anything is compiled.
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::text {

// A tool that may be called, in the chat format's markup.
struct CallableTool {
  std::string name;
  std::string parameters;  // JSON Schema's text; empty: any arguments
  bool is_strict = false;  // refused, not loosened, where a grammar cannot hold arguments to all of them
};

struct GrammarDefinition {
  enum class Content {
    kNone,        // calls alone
    kJson,        // any JSON object
    kJsonSchema,  // what `text`, a JSON Schema, describes, on one line
    kRegex,       // the whole of it as `text`, a regular expression, says
  };
  Content content = Content::kNone;
  std::string text;
  // Instead of the content the answer may be a block of calls of these.
  std::vector<CallableTool> tools;
  bool allows_parallel = true;  // else one call
  // The grammar begins after the token of markup in the block's first tag: who decides whether to call is free until
  // then.
  bool is_in_block = false;

  // Equal for equal definitions, and for no others.
  std::string key() const;
};

// Bounds on what is compiled.
inline constexpr size_t kMaxSchemaNodes = 10000;    // objects, arrays and values of one JSON Schema
inline constexpr size_t kMaxEnumValues = 4096;      // of all enums of one together
inline constexpr size_t kMaxSchemaRepeat = 4096;    // minLength, maxItems and the like
inline constexpr size_t kMaxPatternRepeats = 4096;  // of a regular expression's characters, nested bounds multiplied

// Why a schema or a regular expression is not taken, in one line with place, expected and found; nothing where it is:
// bounds, and keywords of JSON Schema that a grammar cannot hold an answer to. Bounds alone where `is_lenient`.
std::optional<std::string> find_schema_fault(std::string_view schema, bool is_lenient);
std::optional<std::string> find_pattern_fault(std::string_view pattern);

}  // namespace tessera::text
