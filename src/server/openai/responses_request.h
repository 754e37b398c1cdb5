// SPDX-License-Identifier: Apache-2.0
#pragma once
// The body of POST /v1/responses, without state: nothing is stored, so what refers to something stored is refused.
// Source: API reference of OpenAI's responses.
#include <string>
#include <string_view>

#include "server/api_error.h"
#include "server/request.h"

namespace tessera::server::openai {

struct ResponsesRequest {
  ChatRequest chat;
  // JSON text of an object: fields of the request that the answer repeats, with their defaults.
  std::string repeated;
  bool wants_logprobs = false;
};

const Schema& responses_schema();

// The request, or the 400 (404 for a model that is not served) that answers it.
Reply<ResponsesRequest> parse_responses(std::string_view body, const ServedModel& model);

}  // namespace tessera::server::openai
