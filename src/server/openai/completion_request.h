// SPDX-License-Identifier: Apache-2.0
#pragma once
// The body of POST /v1/completions: text as it is, or token ids, to go on with.
// Source: API reference of OpenAI's completions.
#include <string_view>

#include "server/api_error.h"
#include "server/request.h"

namespace tessera::server::openai {

const Schema& completion_schema();

// The request, or the 400 (404 for a model that is not served) that answers it.
Reply<CompletionRequest> parse_completion(std::string_view body, const ServedModel& model);

}  // namespace tessera::server::openai
