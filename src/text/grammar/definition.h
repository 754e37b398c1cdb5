// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a grammar is made of, as requests give it.
#include <string>
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

}  // namespace tessera::text
