// SPDX-License-Identifier: Apache-2.0
#pragma once
// The body of POST /v1/chat/completions.
// Source: API reference of OpenAI's chat completions; reasoning_content, thinking and prefix as DeepSeek's service has
// them (api-docs.deepseek.com); chat_template_kwargs, ignore_eos and the like as vLLM has them. docs/server-api.md.
#include <string_view>

#include "server/api_error.h"
#include "server/request.h"

namespace tessera::server::openai {

const Schema& chat_schema();

// The request, or the 400 (404 for a model that is not served) that answers it.
Reply<ChatRequest> parse_chat(std::string_view body, const ServedModel& model);

// The parts that /tokenize shares: schemas of messages and of tools, and what they mean.
Schema messages_schema();
Schema tools_schema();
// Reads messages and tools of a checked body into the request; throws RequestError.
void read_conversation(const Json& body, ChatRequest& request, std::string response_format);
// Reads how to think: thinking, chat_template_kwargs, reasoning_effort, from the most to the least explicit.
std::vector<Field> thinking_fields();
void read_thinking(const Json& body, const ServedModel& model, ChatRequest& request);

}  // namespace tessera::server::openai
