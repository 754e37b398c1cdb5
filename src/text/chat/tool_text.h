// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the chat format says about tools: the block that lists them, and the calls in an assistant's turn.
// Source: encoding/encoding_dsv4.py of deepseek-ai/DeepSeek-V4-Flash; docs/formats/chat.md.
#include <span>
#include <string>

#include "text/chat/message.h"

namespace tessera::text {

// Appends the block of instructions with one line per tool; `tools` are JSON texts.
void append_tools_block(std::string& out, std::span<const std::string> tools);

// Appends the block of calls, from its opening to its closing tag.
void append_tool_calls(std::string& out, std::span<const ToolCall> calls);

}  // namespace tessera::text
