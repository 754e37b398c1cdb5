// SPDX-License-Identifier: Apache-2.0
#include "fuzz/targets.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/strings.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/shard_index.h"
#include "engine/tier_file.h"
#include "model/config.h"
#include "server/anthropic/messages_request.h"
#include "server/openai/chat_request.h"
#include "server/openai/chat_response.h"
#include "server/openai/completion_request.h"
#include "server/openai/responses_request.h"
#include "server/openai/tokenize.h"
#include "text/chat/answer_parser.h"
#include "text/chat/encode.h"
#include "text/chat/read_messages.h"
#include "text/detokenizer.h"
#include "text/grammar/pattern.h"
#include "text/grammar/schema_fault.h"
#include "text/grammar/schema_text.h"
#include "text/stop_matcher.h"
#include "text/tokenizer/tokenizer.h"

namespace tessera::fuzz {

namespace {

// An error that blames the input is the right answer to bad input; anything else is a finding.
template <class Action>
void allow_refusal(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    const bool is_refusal = error.code() == ErrorCode::kDataLoss || error.code() == ErrorCode::kUnsupported;
    if (!is_refusal || std::string(error.what()).find('\n') != std::string::npos) __builtin_trap();
  }
}

std::string text_of(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

void safetensors_header(const uint8_t* data, size_t size) {
  // The data size is taken from the last byte, so that tilings can match.
  const std::string text = text_of(data, size);
  const uint64_t data_bytes = size == 0 ? 0 : data[size - 1];
  allow_refusal([&] { checkpoint::parse_safetensors_header(text, 8 + size + data_bytes, "f"); });
}

void shard_index(const uint8_t* data, size_t size) {
  allow_refusal([&] { checkpoint::parse_shard_index(text_of(data, size), "f"); });
}

void config(const uint8_t* data, size_t size) {
  allow_refusal([&] { model::parse_config(Json::parse(text_of(data, size), "f"), "f"); });
}

void tokenizer(const uint8_t* data, size_t size) {
  allow_refusal([&] { text::Tokenizer::parse(text_of(data, size), "f").encode("a b\xff"); });
}

// A file of the prefix cache's disk tier, as it is and with checksums that fit.
void tier_file(const uint8_t* data, size_t size) {
  constexpr size_t kHeader = 128, kPayloadSum = 96, kHeaderSum = 112;
  std::vector<uint8_t> bytes(data, data + size);
  allow_refusal([&] { engine::parse_tier_file(bytes, "f"); });
  if (size < kHeader) return;
  const auto stamp = [&](size_t at, const uint8_t* from, size_t count) {
    XXH128_canonical_t sum;
    XXH128_canonicalFromHash(&sum, XXH3_128bits(from, count));
    std::memcpy(bytes.data() + at, sum.digest, sizeof(sum.digest));
  };
  stamp(kPayloadSum, bytes.data() + kHeader, size - kHeader);
  stamp(kHeaderSum, bytes.data(), kHeaderSum);
  allow_refusal([&] {
    const engine::TierFile file = engine::parse_tier_file(bytes, "f");
    const auto parts = engine::tier_file_bytes(file.tail.size(), file.first->size(), file.second->size());
    if (parts != static_cast<int64_t>(size)) __builtin_trap();
  });
}

// Text helpers never fail: their results are valid UTF-8 whatever comes in, in any chunks.
void utf8(const uint8_t* data, size_t size) {
  const std::string text = text_of(data, size);
  if (!is_valid_utf8(replace_invalid_utf8(text)) || !is_valid_utf8(printable(text))) __builtin_trap();
  if (complete_utf8_prefix(text) > size) __builtin_trap();
  text::StopMatcher matcher({"ab", "\xe4\xb8"});
  std::string shown;
  for (const char c : text) shown += matcher.push(std::string(1, c));
  shown += matcher.finish();
  if (shown.size() > size) __builtin_trap();
}

// What can be read can be rendered, in every mode, as valid UTF-8.
void chat_request(const uint8_t* data, size_t size) {
  allow_refusal([&] {
    const Json request = Json::parse_python(text_of(data, size), "request");
    const JsonCursor root(request, "request");
    const std::vector<text::Message> messages = text::read_messages(root.at("messages"), root.find("tools"));
    for (const text::Thinking thinking : {text::Thinking::kOff, text::Thinking::kOn}) {
      for (const bool drops : {false, true}) {
        const text::ChatOptions options{thinking, text::Effort::kMax, text::EffortTable::kOfficial, drops};
        if (!is_valid_utf8(text::render_chat(messages, options).text)) __builtin_trap();
      }
    }
  });
}

// The parser never fails; cut into bytes it finds the same; arguments of complete calls are JSON. The first byte
// chooses the mode.
void dsml_parser(const uint8_t* data, size_t size) {
  const std::string text = size == 0 ? "" : text_of(data + 1, size - 1);
  const bool is_thinking = size > 0 && data[0] % 2 == 1;
  text::AnswerParser whole(is_thinking), parts(is_thinking);
  whole.push(text);
  whole.finish(text::Ending::kEndToken);
  for (const char c : text) parts.push(std::string_view(&c, 1));
  parts.finish(text::Ending::kEndToken);
  const text::Answer &a = whole.answer(), &b = parts.answer();
  if (a.reasoning != b.reasoning || a.content != b.content || a.fault != b.fault) __builtin_trap();
  if (a.calls.size() != b.calls.size() || a.fault.find('\n') != std::string::npos) __builtin_trap();
  for (size_t i = 0; i < a.calls.size(); ++i) {
    if (a.calls[i].name != b.calls[i].name || a.calls[i].arguments != b.calls[i].arguments) __builtin_trap();
    if (a.calls[i].is_complete) Json::parse_python(a.calls[i].arguments, "arguments");
  }
}

server::ServedModel served_model() {
  server::ServedModel model;
  model.names = {"m"};
  model.vocab_size = 1000;
  model.max_model_len = 4096;
  model.has_grammars = true;
  return model;
}

// Every body gives a request, or an error that both APIs can render in one short line; requests can be rendered.
template <class T>
void expect_reply(const server::Reply<T>& reply) {
  if (reply.ok()) return;
  const server::ApiError& error = reply.error();
  if (error.status != 400 && error.status != 404) __builtin_trap();
  if (error.message.find('\n') != std::string::npos || error.message.empty()) __builtin_trap();
  if (server::openai_error_body(error).size() >= 1024 || server::anthropic_error_body(error).size() >= 1024) {
    __builtin_trap();
  }
}

void expect_renders(const server::ChatRequest& request) {
  if (!is_valid_utf8(text::render_chat(request.messages, request.chat).text)) __builtin_trap();
  if (request.options.num_choices < 1 || request.options.num_choices > server::kMaxChoices) __builtin_trap();
}

void chat_completions_body(const uint8_t* data, size_t size) {
  const auto reply = server::openai::parse_chat(text_of(data, size), served_model());
  expect_reply(reply);
  if (reply.ok()) expect_renders(reply.value());
}

void responses_body(const uint8_t* data, size_t size) {
  const auto reply = server::openai::parse_responses(text_of(data, size), served_model());
  expect_reply(reply);
  if (reply.ok()) expect_renders(reply.value().chat);
}

void messages_body(const uint8_t* data, size_t size) {
  const std::string body = text_of(data, size);
  const auto reply = server::anthropic::parse_messages(body, served_model());
  expect_reply(reply);
  if (reply.ok()) expect_renders(reply.value());
  expect_reply(server::anthropic::parse_count_tokens(body, served_model()));
}

// The bodies that have no conversation, or need none.
void text_bodies(const uint8_t* data, size_t size) {
  const std::string body = text_of(data, size);
  expect_reply(server::openai::parse_completion(body, served_model()));
  expect_reply(server::openai::parse_tokenize(body, served_model()));
  expect_reply(server::openai::parse_detokenize(body, served_model()));
}

class CountedIds : public server::IdSource {
 public:
  std::string next(std::string_view prefix) override { return std::string(prefix) + std::to_string(++count_); }

 private:
  int count_ = 0;
};

// An answer cut into bytes gives the same rendering as whole, whatever the model wrote. The first byte chooses.
void answer_stream(const uint8_t* data, size_t size) {
  const std::string text = size == 0 ? "" : text_of(data + 1, size - 1);
  server::AnswerOptions options;
  options.starts_in_reasoning = size > 0 && data[0] % 2 == 1;
  options.allows_parallel_calls = size > 0 && data[0] % 4 < 2;
  if (size > 0 && data[0] % 8 >= 4) options.stops = {"ab", "b\n"};
  CountedIds whole_ids, part_ids;
  server::AnswerAssembler whole(options, whole_ids), parts(options, part_ids);
  whole.push(text);
  for (const char c : text) {
    if (!parts.has_stopped()) parts.push(std::string_view(&c, 1));
  }
  const server::openai::AnswerHead head = {"id", "m", 1, "f"};
  std::string rendered[2];
  for (server::AnswerAssembler* assembler : {&whole, &parts}) {
    assembler->finish(server::Ending::kEndToken);
    rendered[assembler == &parts] = server::openai::render_chat(head, {&assembler->answer(), 1}, {}, false);
  }
  if (rendered[0] != rendered[1]) __builtin_trap();
}

// A schema or a pattern is refused in one short line, or bounded.
void schema(const uint8_t* data, size_t size) {
  const std::string text = text_of(data, size);
  const auto expect_line = [](const std::optional<std::string>& fault) {
    if (fault && (fault->empty() || fault->size() > 4096 || fault->find('\n') != std::string::npos)) __builtin_trap();
  };
  for (const auto use : {text::PatternUse::kAnswer, text::PatternUse::kJsonString, text::PatternUse::kArgument}) {
    expect_line(text::find_pattern_fault(text, use));
  }
  allow_refusal([&] {
    const auto held = text::find_schema_fault(text, text::SchemaUse::kAnswer);
    expect_line(held);
    if (text::find_schema_fault(text, text::SchemaUse::kTool) && !held) __builtin_trap();
    if (held && !text::find_schema_fault(text, text::SchemaUse::kStrictTool)) __builtin_trap();
    Json::parse(text::schema_for_compiler(text, text::PatternUse::kJsonString), "schema");
  });
}

}  // namespace

const Target kTargets[] = {
    {"safetensors_header", safetensors_header},
    {"shard_index", shard_index},
    {"config", config},
    {"tokenizer", tokenizer},
    {"utf8", utf8},
    {"chat_request", chat_request},
    {"dsml_parser", dsml_parser},
    {"chat_completions_body", chat_completions_body},
    {"responses_body", responses_body},
    {"messages_body", messages_body},
    {"text_bodies", text_bodies},
    {"answer_stream", answer_stream},
    {"schema", schema},
    {"tier_file", tier_file},
};
const size_t kNumTargets = sizeof(kTargets) / sizeof(kTargets[0]);

}  // namespace tessera::fuzz
