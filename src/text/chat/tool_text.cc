// SPDX-License-Identifier: Apache-2.0
#include "text/chat/tool_text.h"

#include <fmt/format.h>

#include <string_view>

#include "base/error.h"
#include "base/json.h"
#include "text/chat/markers.h"
#include "text/chat/python_json.h"

namespace tessera::text {

namespace {

// Wire text: the model was trained with it. {0} is kDsmlToken, {1} the schemas.
constexpr std::string_view kToolsBlock = R"(## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{0}tool_calls>" block like the following:

<{0}tool_calls>
<{0}invoke name="$TOOL_NAME">
<{0}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{0}parameter>
...
</{0}invoke>
<{0}invoke name="$TOOL_NAME2">
...
</{0}invoke>
</{0}tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{1}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
)";

void append_parameter(std::string& out, std::string_view name, bool is_string, std::string_view value) {
  out += kParameterTag;
  out += fmt::format(" name=\"{}\" string=\"{}\">{}", name, is_string ? "true" : "false", value);
  out += kEndParameterTag;
  out += ">\n";
}

// The lines of a call's parameters, or one empty line.
void append_parameters(std::string& out, const std::string& arguments) {
  Json json;
  try {
    json = Json::parse_python(arguments, "arguments");
  } catch (const Error&) {
    // Not JSON: a string then, as in the reference.
  }
  if (json.kind() != Json::Kind::kObject) return append_parameter(out, "arguments", true, arguments);
  if (json.object().empty()) out += '\n';
  for (const auto& [name, value] : json.object()) {
    const bool is_string = value.kind() == Json::Kind::kString;
    append_parameter(out, name, is_string, is_string ? value.string() : python_json(value));
  }
}

}  // namespace

void append_tools_block(std::string& out, std::span<const std::string> tools) {
  out += fmt::format(kToolsBlock, kDsmlToken, fmt::join(tools, "\n"));
}

void append_tool_calls(std::string& out, std::span<const ToolCall> calls) {
  out += kToolCallsTag;
  out += ">\n";
  for (const ToolCall& call : calls) {
    out += kInvokeTag;
    out += fmt::format(" name=\"{}\">\n", call.name);
    append_parameters(out, call.arguments);
    out += kEndInvokeTag;
    out += ">\n";
  }
  out += kEndToolCallsTag;
}

}  // namespace tessera::text
