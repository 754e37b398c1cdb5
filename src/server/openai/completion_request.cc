// SPDX-License-Identifier: Apache-2.0
#include "server/openai/completion_request.h"

#include <fmt/format.h>

#include <utility>

#include "server/request_fields.h"

namespace tessera::server::openai {

namespace {

Schema make_completion_schema() {
  const Schema text = string(kMaxTextLength, 1);
  const Schema ids = array(integer(0, INT32_MAX), static_cast<size_t>(kMaxTokens), 1);
  std::vector<Field> fields = generation_fields();
  append(fields, {
                     required("prompt", either({text, array(text, kMaxPrompts, 1), ids, array(ids, kMaxPrompts, 1)})),
                     optional("max_tokens", integer(0, kMaxTokens).or_null()),
                     optional("echo", boolean().or_null()),
                     optional("logprobs", integer(0, kMaxTopLogprobs).or_null()),
                     optional("add_special_tokens", boolean().or_null()),
                     only_empty("suffix"),
                     never("response_format"),
                 });
  return object(std::move(fields));
}

std::vector<int32_t> read_ids(const Json& list, const std::string& field, const ServedModel& model) {
  std::vector<int32_t> ids;
  ids.reserve(list.array().size());
  for (const Json& item : list.array()) {
    const int64_t id = integer_of(item);
    if (id >= model.vocab_size) {
      fail_field(kInvalidValue, fmt::format("{}[{}]", field, ids.size()),
                 fmt::format("token ids from 0 to {}", model.vocab_size - 1), fmt::format("{}", id));
    }
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

std::vector<Prompt> read_prompts(const Json& prompt, const ServedModel& model) {
  if (prompt.kind() == Json::Kind::kString) return {prompt.string()};
  const Json::Kind kind = prompt.array().front().kind();
  if (kind != Json::Kind::kString && kind != Json::Kind::kArray) return {read_ids(prompt, "prompt", model)};
  std::vector<Prompt> prompts;
  for (const Json& item : prompt.array()) {
    if (kind == Json::Kind::kString) {
      prompts.push_back(item.string());
    } else {
      prompts.push_back(read_ids(item, fmt::format("prompt[{}]", prompts.size()), model));
    }
  }
  return prompts;
}

CompletionRequest read_completion(std::string_view text, const ServedModel& model) {
  const Json body = parse_body(text);
  check(body, completion_schema());
  CompletionRequest request;
  request.options = read_generation(body, completion_schema(), model, {"max_tokens"});
  if (const Json* logprobs = given(body, "logprobs")) {
    request.options.num_logprobs = static_cast<int>(integer_of(*logprobs));
  }
  request.echoes = flag_or(body, "echo");
  request.adds_begin_token = flag_or(body, "add_special_tokens", true);
  request.prompts = read_prompts(*body.find("prompt"), model);
  const size_t num_answers = request.prompts.size() * static_cast<size_t>(request.options.num_choices);
  if (num_answers > kMaxPrompts) {
    fail_field(kConflict, "n", fmt::format("at most {} answers over all prompts", kMaxPrompts),
               fmt::format("{}", num_answers));
  }
  return request;
}

}  // namespace

const Schema& completion_schema() {
  static const Schema kSchema = make_completion_schema();
  return kSchema;
}

Reply<CompletionRequest> parse_completion(std::string_view body, const ServedModel& model) {
  return reply_of([&] { return read_completion(body, model); });
}

}  // namespace tessera::server::openai
