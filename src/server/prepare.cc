// SPDX-License-Identifier: Apache-2.0
#include "server/prepare.h"

#include <algorithm>
#include <ctime>
#include <random>
#include <utility>

#include "server/anthropic/messages_request.h"
#include "server/anthropic/messages_response.h"
#include "server/openai/chat_request.h"
#include "server/openai/completion_request.h"
#include "server/openai/responses_request.h"
#include "server/openai/tokenize.h"
#include "server/thinking_budget.h"
#include "text/chat/markers.h"

namespace tessera::server {

namespace {

// A token is hardly ever more than so many bytes of text: an estimate from below for the check of room.
constexpr size_t kMostBytesPerToken = 16;

template <class T>
T taken(Reply<T> reply) {
  if (!reply.ok()) throw RequestError(reply.error());
  return std::move(reply.value());
}

uint64_t random_seed() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

// Where another prompt may depart from this one: after the system's message, where users' messages begin, and after
// the last mark of an answer, which other reasoning may follow. Every one costs a step that ends there, so those of a
// long conversation are some way apart.
std::vector<int64_t> find_boundaries(const std::vector<int32_t>& prompt, const text::Tokenizer& tokenizer) {
  constexpr int64_t kApart = 1024;  // tokens
  const auto user = tokenizer.added_token(text::kUserToken), assistant = tokenizer.added_token(text::kAssistantToken);
  std::vector<int64_t> boundaries;
  int64_t last_user = 0, last_answer = 0;
  for (size_t i = 1; i < prompt.size(); ++i) {
    const int64_t position = static_cast<int64_t>(i);
    if (prompt[i - 1] == assistant) last_answer = position;
    if (prompt[i] != user) continue;
    last_user = position;
    if (boundaries.empty() || position - boundaries.back() >= kApart) boundaries.push_back(position);
  }
  for (const int64_t last : {last_user, last_answer}) {
    if (last > 0 && (boundaries.empty() || last > boundaries.back())) boundaries.push_back(last);
  }
  return boundaries;
}

engine::Priority priority_of(int priority) {
  if (priority == 0) return engine::Priority::kNormal;
  return priority < 0 ? engine::Priority::kHigh : engine::Priority::kLow;
}

}  // namespace

openai::AnswerHead Preparer::head(std::string_view id_prefix, const std::string& model) const {
  return {ids_.next(id_prefix), model, static_cast<int64_t>(std::time(nullptr)), serving_.fingerprint};
}

engine::Request Preparer::engine_request(const GenerationOptions& options, std::vector<int32_t> prompt,
                                         const Caller& caller, int64_t default_tokens) const {
  const int64_t length = static_cast<int64_t>(prompt.size()), longest = serving_.model.max_model_len;
  const int64_t left = std::max<int64_t>(1, longest - length);
  const int64_t max_tokens = options.max_tokens.value_or(std::min(left, default_tokens));
  if (length + max_tokens > longest) throw RequestError(context_exceeded(length, max_tokens, longest));
  engine::Request request;
  request.prompt = std::move(prompt);
  request.max_tokens = max_tokens;
  request.sampling = options.sampling;
  request.sampling.params.seed = options.seed ? *options.seed : random_seed();
  request.num_choices = options.num_choices;
  request.stop_at_end_token = !options.ignores_end_token;
  if (options.num_logprobs >= 0) request.logprobs = options.num_logprobs;
  request.client = caller.client;
  request.priority = priority_of(options.priority);
  request.cache_salt = options.cache_salt;
  request.boundaries = find_boundaries(request.prompt, *serving_.tokenizer);
  return request;
}

std::string Preparer::render(ChatRequest& request, const Caller& caller, bool& starts_in_reasoning) const {
  replay_.restore(caller.owner, request.messages);
  text::Prompt prompt = text::render_chat(request.messages, request.chat);
  starts_in_reasoning = prompt.starts_in_reasoning;
  if (starts_in_reasoning && request.thinking_budget == 0) {
    prompt.text += text::kEndThinkToken;
    starts_in_reasoning = false;
  }
  return std::move(prompt.text);
}

// A mask and no bias: with a bias no step could draw the token, and its logits would have to come to the host.
Preparer::Preparer(const Serving& serving, ReplayStore& replay, IdSource& ids)
    : serving_(serving), replay_(replay), ids_(ids) {
  const auto markup = serving.tokenizer->added_token(text::kDsmlToken);
  if (!markup || *markup >= serving.model.vocab_size) return;
  without_markup_ = std::make_shared<std::vector<uint32_t>>(engine::mask_without(*markup, serving.model.vocab_size));
}

PreparedAnswer Preparer::from_chat(ChatRequest& request, const Caller& caller, const RoomCheck& check,
                                   Compiling compiling) const {
  PreparedAnswer out;
  const std::string text = render(request, caller, out.options.starts_in_reasoning);
  check.check(1 + static_cast<int64_t>(text.size() / kMostBytesPerToken));
  std::shared_ptr<const engine::ConstraintSource> constraint;
  if (serving_.grammars != nullptr) {
    constraint = make_constraint(request, out.options.starts_in_reasoning, *serving_.grammars, *serving_.tokenizer,
                                 serving_.eos_ids, compiling);
  }
  out.requests.push_back(
      engine_request(request.options, serving_.tokenizer->encode(text), caller, serving_.model.max_model_len));
  // A grammar without calls keeps their markup out by itself.
  if (!request.tools.may_call() && constraint == nullptr) out.requests.front().allowed = without_markup_;
  const auto end_think = serving_.tokenizer->added_token(text::kEndThinkToken);
  const bool may_not_reason = request.thinking_budget == 0 && request.chat.thinking == text::Thinking::kOn;
  const bool has_budget = request.thinking_budget && (out.options.starts_in_reasoning || may_not_reason);
  if (has_budget && end_think && *end_think < serving_.model.vocab_size) {
    constraint = with_thinking_budget({*request.thinking_budget, *end_think}, std::move(constraint),
                                      std::exchange(out.requests.front().allowed, nullptr), *serving_.tokenizer,
                                      serving_.eos_ids);
  }
  out.requests.front().constraint = std::move(constraint);
  out.num_choices = request.options.num_choices;
  out.options.must_call = request.tools.must_call();
  out.options.allows_parallel_calls = request.tools.allows_parallel;
  out.options.stops = request.options.stops;
  out.has_logprobs = out.options.keeps_logprobs = request.options.num_logprobs >= 0;
  out.is_stream = request.options.is_stream;
  out.owner = caller.owner;
  out.ignored = request.options.ignored;
  return out;
}

PreparedAnswer Preparer::from_completion(const CompletionRequest& request, const Caller& caller,
                                         const RoomCheck& check) const {
  PreparedAnswer out;
  size_t num_bytes = 0;
  for (const Prompt& prompt : request.prompts) {
    const std::string* text = std::get_if<std::string>(&prompt);
    num_bytes += text != nullptr ? text->size() : std::get<std::vector<int32_t>>(prompt).size() * kMostBytesPerToken;
  }
  check.check(1 + static_cast<int64_t>(num_bytes / kMostBytesPerToken));
  const uint64_t seed = random_seed();
  for (const Prompt& prompt : request.prompts) {
    std::vector<int32_t> ids;
    out.has_added_begin.push_back(0);
    if (const std::string* text = std::get_if<std::string>(&prompt)) {
      ids = serving_.tokenizer->encode(*text);
      if (request.adds_begin_token && (ids.empty() || ids.front() != serving_.bos_id)) {
        ids.insert(ids.begin(), serving_.bos_id);
        out.has_added_begin.back() = 1;
      }
    } else {
      ids = std::get<std::vector<int32_t>>(prompt);
    }
    engine::Request one = engine_request(request.options, std::move(ids), caller, kDefaultCompletionTokens);
    if (!request.options.seed) one.sampling.params.seed = seed;
    if (request.echoes && request.options.num_logprobs >= 0) one.prompt_logprobs = request.options.num_logprobs;
    out.requests.push_back(std::move(one));
  }
  out.num_choices = request.options.num_choices;
  out.options.is_chat = false;
  out.options.stops = request.options.stops;
  out.has_logprobs = out.options.keeps_logprobs = request.options.num_logprobs >= 0;
  out.is_stream = request.options.is_stream;
  out.echoes = request.echoes;
  out.ignored = request.options.ignored;
  return out;
}

PreparedAnswer Preparer::prepare(RouteKind route, std::string_view body, const Caller& caller, const RoomCheck& check,
                                 Compiling compiling) const {
  switch (route) {
    case RouteKind::kChat: {
      ChatRequest request = taken(openai::parse_chat(body, serving_.model));
      PreparedAnswer out = from_chat(request, caller, check, compiling);
      out.writer =
          chat_writer(head("chatcmpl-", request.options.model), out.has_logprobs, request.options.streams_usage);
      return out;
    }
    case RouteKind::kCompletions: {
      const CompletionRequest request = taken(openai::parse_completion(body, serving_.model));
      PreparedAnswer out = from_completion(request, caller, check);
      out.writer =
          completion_writer(head("cmpl-", request.options.model), out.has_logprobs, request.options.streams_usage);
      return out;
    }
    case RouteKind::kResponses: {
      openai::ResponsesRequest request = taken(openai::parse_responses(body, serving_.model));
      PreparedAnswer out = from_chat(request.chat, caller, check, compiling);
      // Log probabilities may be asked for without any beside the token's own.
      out.has_logprobs = out.options.keeps_logprobs = request.wants_logprobs;
      out.writer =
          responses_writer(head("resp_", request.chat.options.model), request.repeated, request.wants_logprobs);
      return out;
    }
    case RouteKind::kMessages: {
      ChatRequest request = taken(anthropic::parse_messages(body, serving_.model));
      PreparedAnswer out = from_chat(request, caller, check, compiling);
      out.options.call_id_prefix = "toolu_";
      out.writer = message_writer(ids_.next("msg_"), request.options.model);
      return out;
    }
    default:
      fail(ErrorCode::kInternal, "a route that does not generate");
  }
}

std::string Preparer::answer(RouteKind route, std::string_view body, const Caller& caller) const {
  bool starts_in_reasoning = false;
  const text::Tokenizer& tokenizer = *serving_.tokenizer;
  if (route == RouteKind::kCountTokens) {
    ChatRequest request = taken(anthropic::parse_count_tokens(body, serving_.model));
    const size_t count = tokenizer.encode(render(request, caller, starts_in_reasoning)).size();
    return anthropic::render_count(static_cast<int64_t>(count));
  }
  if (route == RouteKind::kDetokenize) {
    std::string text;
    for (const int32_t id : taken(openai::parse_detokenize(body, serving_.model))) {
      if (id < tokenizer.vocab_size()) text += tokenizer.token_bytes(id);
    }
    return openai::render_detokenize(text);
  }
  openai::TokenizeRequest request = taken(openai::parse_tokenize(body, serving_.model));
  std::vector<int32_t> ids;
  if (std::string* text = std::get_if<std::string>(&request.input)) {
    ids = tokenizer.encode(*text);
    if (request.adds_begin_token && (ids.empty() || ids.front() != serving_.bos_id)) {
      ids.insert(ids.begin(), serving_.bos_id);
    }
  } else {
    ids = tokenizer.encode(render(std::get<ChatRequest>(request.input), caller, starts_in_reasoning));
  }
  std::vector<std::string> texts;
  for (const int32_t id : ids) {
    if (request.shows_tokens) texts.push_back(tokenizer.token_bytes(id));
  }
  return openai::render_tokenize(ids, texts, serving_.model.max_model_len);
}

}  // namespace tessera::server
