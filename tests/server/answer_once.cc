// SPDX-License-Identifier: Apache-2.0
// Answers one request without a socket or a model: clients_test.py puts it behind the clients' own transport.
//   answer_once ROUTE < BODY      prints "STATUS CONTENT-TYPE", a line end, and the answer's body
// The model's part is played by a text: reasoning where the request thinks, then calls where it has tools and no result
// yet, else words.
#include <fmt/format.h>

#include <cstdio>
#include <iostream>
#include <iterator>

#include "answers.h"
#include "server/anthropic/messages_request.h"
#include "server/anthropic/messages_response.h"
#include "server/openai/chat_request.h"
#include "server/openai/chat_response.h"
#include "server/openai/completion_request.h"
#include "server/openai/completion_response.h"
#include "server/openai/responses_request.h"
#include "server/openai/responses_response.h"
#include "server/sse.h"
#include "server/status_pages.h"

namespace tessera::server {
namespace {

struct Answered {
  int status = 200;
  std::string body;
  bool is_stream = false;
};

const openai::AnswerHead kHead = {"resp_1", "tiny", 1700000000, "fp"};

Sampled play(const ChatRequest& request) {
  Sampled sampled;
  sampled.starts_in_reasoning = request.chat.thinking == text::Thinking::kOn;
  sampled.stops = request.options.stops;
  if (sampled.starts_in_reasoning) sampled.text = "Let me see\u2026" + std::string(text::kEndThinkToken);
  sampled.text += "It is 5, \u4e16\u754c.";
  const bool has_result = request.messages.back().role == text::Role::kTool;
  if (request.tools.may_call() && !has_result) {
    sampled.text += "\n\n" + std::string(text::kToolCallsTag) + ">\n";
    for (const char* city : {"K\u00f6ln", "Rome \"old\""}) {
      sampled.text += fmt::format("{} name=\"{}\">\n{} name=\"city\" string=\"true\">{}{}>\n{}>\n", text::kInvokeTag,
                                  request.tools.tools.front().name, text::kParameterTag, city, text::kEndParameterTag,
                                  text::kEndInvokeTag);
    }
    sampled.text += text::kEndToolCallsTag;
  }
  return sampled;
}

template <class OnDelta>
FinishedAnswer drive_request(const Sampled& sampled, AnswerOptions options, const OnDelta& on_delta) {
  std::mt19937 random(7);
  return drive(sampled, cut(sampled.text, random, 5), std::move(options), on_delta);
}

// The last delta belongs to the stream's end.
template <class Stream>
std::string all_but_last(const Stream& render, const std::vector<AnswerDelta>& deltas) {
  std::string out;
  for (size_t i = 0; i + 1 < deltas.size(); ++i) out += render(deltas[i]);
  return out;
}

Answered refused(const ApiError& error, bool is_anthropic = false) {
  return {error.status, is_anthropic ? anthropic_error_body(error) : openai_error_body(error), false};
}

Answered answer_chat(const std::string& body) {
  const auto reply = openai::parse_chat(body, served_model());
  if (!reply.ok()) return refused(reply.error());
  const ChatRequest& request = reply.value();
  const bool has_logprobs = request.options.num_logprobs >= 0;
  const Sampled sampled = play(request);
  const openai::ChatStream stream(kHead, has_logprobs, request.options.streams_usage);
  Usage usage = {40, 30, 0, 0};
  std::string lines(kSseKeepAlive);
  std::vector<FinishedAnswer> answers;
  for (int choice = 0; choice < request.options.num_choices; ++choice) {
    std::vector<AnswerDelta> deltas;
    answers.push_back(drive_request(sampled, options_of(sampled, has_logprobs),
                                    [&](const AnswerDelta& delta) { deltas.push_back(delta); }));
    usage.add(answers.back());
    lines += stream.begin(choice);
    lines += all_but_last([&](const AnswerDelta& delta) { return stream.delta(choice, delta); }, deltas);
    lines += stream.end(choice, deltas.back(), answers.back().reason);
  }
  if (!request.options.is_stream) return {200, openai::render_chat(kHead, answers, usage, has_logprobs), false};
  if (request.options.streams_usage) lines += stream.usage(usage);
  return {200, lines + std::string(kSseDone), true};
}

Answered answer_completion(const std::string& body) {
  const auto reply = openai::parse_completion(body, served_model());
  if (!reply.ok()) return refused(reply.error());
  const GenerationOptions& request = reply.value().options;
  const bool has_logprobs = request.num_logprobs >= 0;
  const Sampled sampled = {" and so on", false, Ending::kLength, request.stops};
  AnswerOptions options = options_of(sampled, has_logprobs);
  options.is_chat = false;
  openai::CompletionStream stream(kHead, has_logprobs, false);
  std::vector<AnswerDelta> deltas;
  const FinishedAnswer answer =
      drive_request(sampled, options, [&](const AnswerDelta& delta) { deltas.push_back(delta); });
  if (!request.is_stream)
    return {200, openai::render_completion(kHead, {&answer, 1}, {3, 0, 2, 0}, has_logprobs), false};
  std::string lines = all_but_last([&](const AnswerDelta& delta) { return stream.delta(0, delta); }, deltas);
  lines += stream.end(0, deltas.back(), answer.reason);
  return {200, lines + std::string(kSseDone), true};
}

Answered answer_responses(const std::string& body) {
  const auto reply = openai::parse_responses(body, served_model());
  if (!reply.ok()) return refused(reply.error());
  const openai::ResponsesRequest& request = reply.value();
  const Sampled sampled = play(request.chat);
  openai::ResponsesStream stream(kHead, request.repeated, request.wants_logprobs);
  std::string lines = stream.begin();
  std::vector<AnswerDelta> deltas;
  const FinishedAnswer answer = drive_request(sampled, options_of(sampled, request.wants_logprobs),
                                              [&](const AnswerDelta& delta) { deltas.push_back(delta); });
  Usage usage = {40, 30, 0, 0};
  usage.add(answer);
  if (!request.chat.options.is_stream) {
    return {200, openai::render_response(kHead, request.repeated, answer, usage, request.wants_logprobs), false};
  }
  lines += all_but_last([&](const AnswerDelta& delta) { return stream.delta(delta); }, deltas);
  lines += stream.end(deltas.back(), answer, usage);
  return {200, lines, true};
}

Answered answer_messages(const std::string& body) {
  const auto reply = anthropic::parse_messages(body, served_model());
  if (!reply.ok()) return refused(reply.error(), true);
  const Sampled sampled = play(reply.value());
  AnswerOptions options = options_of(sampled);
  options.call_id_prefix = "toolu_";
  anthropic::MessageStream stream("msg_1", "tiny");
  Usage usage = {40, 30, 0, 0};
  std::string lines = stream.begin(usage) + anthropic::MessageStream::ping();
  std::vector<AnswerDelta> deltas;
  const FinishedAnswer answer =
      drive_request(sampled, options, [&](const AnswerDelta& delta) { deltas.push_back(delta); });
  usage.add(answer);
  if (!reply.value().options.is_stream) {
    return {200, anthropic::render_message("msg_1", "tiny", answer, usage), false};
  }
  lines += all_but_last([&](const AnswerDelta& delta) { return stream.delta(delta); }, deltas);
  lines += stream.end(deltas.back(), answer, usage);
  return {200, lines, true};
}

Answered answer_count(const std::string& body) {
  const auto reply = anthropic::parse_count_tokens(body, served_model());
  if (!reply.ok()) return refused(reply.error(), true);
  return {200, anthropic::render_count(11), false};
}

Answered answer(const std::string& route, const std::string& body) {
  if (route == "/v1/chat/completions") return answer_chat(body);
  if (route == "/v1/completions") return answer_completion(body);
  if (route == "/v1/responses") return answer_responses(body);
  if (route == "/v1/messages") return answer_messages(body);
  if (route == "/v1/messages/count_tokens") return answer_count(body);
  if (route == "/v1/models") return {200, render_models(served_model(), 1700000000), false};
  return refused(not_found("POST", route));
}

}  // namespace
}  // namespace tessera::server

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::string body{std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>()};
  const tessera::server::Answered answered = tessera::server::answer(argv[1], body);
  std::cout << answered.status << (answered.is_stream ? " text/event-stream\n" : " application/json\n")
            << answered.body;
  return 0;
}
