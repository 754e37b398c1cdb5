// SPDX-License-Identifier: Apache-2.0
#pragma once
// The bodies of POST /v1/messages and /v1/messages/count_tokens.
// Source: API reference of Anthropic's messages.
#include <string_view>

#include "server/api_error.h"
#include "server/request.h"

namespace tessera::server::anthropic {

const Schema& messages_schema();
const Schema& count_tokens_schema();

// The request, or the 400 (404 for a model that is not served) that answers it. Only errors have openai's fields too;
// anthropic_error_body renders them.
Reply<ChatRequest> parse_messages(std::string_view body, const ServedModel& model);
// What would be rendered for the same body with max_tokens.
Reply<ChatRequest> parse_count_tokens(std::string_view body, const ServedModel& model);

}  // namespace tessera::server::anthropic
