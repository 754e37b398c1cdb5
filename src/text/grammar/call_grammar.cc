// SPDX-License-Identifier: Apache-2.0
#include "text/grammar/call_grammar.h"

#include <fmt/format.h>

#include "text/chat/markers.h"
#include "text/chat/python_json.h"
#include "text/grammar/schema_text.h"

namespace tessera::text {

namespace {

std::string constant(std::string_view text) {
  return fmt::format(R"({{"type": "const_string", "value": {}}})", json_quoted(text));
}

// The markup has one form, with a line end before each parameter and behind the last (cmake/tessera_xgrammar.cmake):
// the one that past calls have in prompts, and that the parser takes. Where JSON may have blanks there is one at most.
std::string invoke_tag(const CallableTool& tool) {
  const std::string_view any = R"({"type": "object", "additionalProperties": true})";
  return fmt::format(
      R"({{"type": "tag", "begin": {}, "content": {{"type": "json_schema", "style": "deepseek_xml", )"
      R"("max_whitespace_cnt": 1, "json_schema": {}}}, "end": {}}})",
      json_quoted(fmt::format("{} name=\"{}\">", kInvokeTag, tool.name)),
      tool.parameters.empty() ? std::string(any) : schema_for_compiler(tool.parameters, PatternUse::kArgument),
      json_quoted(fmt::format("{}>\n", kEndInvokeTag)));
}

}  // namespace

std::string call_block_tag(const GrammarDefinition& definition) {
  std::string begin = fmt::format("\n\n{}>\n", kToolCallsTag);
  if (definition.is_in_block) begin.erase(0, begin.find(kDsmlToken) + kDsmlToken.size());
  std::string tags;
  for (const CallableTool& tool : definition.tools) tags += (tags.empty() ? "" : ", ") + invoke_tag(tool);
  return fmt::format(
      R"({{"type": "structural_tag", "format": {{"type": "sequence", "elements": [{}, {{"type": )"
      R"("tags_with_separator", "tags": [{}], "separator": "", "at_least_one": true, "stop_after_first": {}}}, {}]}}}})",
      constant(begin), tags, definition.allows_parallel ? "false" : "true", constant(kEndToolCallsTag));
}

}  // namespace tessera::text
