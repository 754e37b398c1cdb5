// SPDX-License-Identifier: Apache-2.0
#pragma once
// Messages as OpenAI's chat completions write them -> the conversation of the chat format. Unknown fields are ignored;
// known ones must be what they should: errors read "FILE: field messages[3].role: expected ..., found ..." (kDataLoss).
//   role            system, user, assistant, tool, developer, latest_reminder
//   content         text, or parts {"type": "text", "text": ...}, joined with an empty line. A tool's parts of other
//                   types become [Unsupported TYPE]; elsewhere they are refused. May be null or absent for system and
//                   assistant.
//   reasoning_content, tool_calls, prefix or wo_eos (true: the model continues this text)      assistant
//   tool_call_id                                                                               tool
//   tools, response_format                                                                     system, developer
//   task            action, query, authority, domain, title, read_url                          all but tool
// Source: API reference of OpenAI's chat completions; encoding/encoding_dsv4.py of deepseek-ai/DeepSeek-V4-Flash.
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "text/chat/message.h"

namespace tessera::text {

// `messages` is the array. `tools` is a request's own list: it goes to the leading system message, which is made where
// there is none. Read the request with Json::parse_python, so that schemas keep every number.
std::vector<Message> read_messages(const JsonCursor& messages, const std::optional<JsonCursor>& tools = std::nullopt);

// The JSON text of each function of {"type": "function", "function": {"name", "description", "parameters"}}. The names,
// and the first level of the parameters' schema (type, properties, required), are checked.
std::vector<std::string> read_tools(const JsonCursor& tools);

}  // namespace tessera::text
