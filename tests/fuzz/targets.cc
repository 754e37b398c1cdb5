// SPDX-License-Identifier: Apache-2.0
#include "fuzz/targets.h"

#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/strings.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/shard_index.h"
#include "model/config.h"
#include "text/chat/answer_parser.h"
#include "text/chat/encode.h"
#include "text/chat/read_messages.h"
#include "text/detokenizer.h"
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

}  // namespace

const Target kTargets[] = {
    {"safetensors_header", safetensors_header,
     R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[24],"data_offsets":[8,32]}} )"},
    {"shard_index", shard_index,
     R"({"metadata":{"total_size":1},"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors"}})"},
    {"config", config,
     R"({"model_type":"deepseek_v4","vocab_size":64,"hidden_size":64,"num_hidden_layers":3,"num_attention_heads":4,"head_dim":128,"qk_rope_head_dim":64,"q_lora_rank":32,"o_groups":2,"o_lora_rank":32,"sliding_window":16,"compress_ratios":[0,4,128],"index_n_heads":16,"index_head_dim":128,"index_topk":4,"n_routed_experts":8,"num_experts_per_tok":2,"moe_intermediate_size":32,"num_hash_layers":1,"routed_scaling_factor":1.5,"swiglu_limit":1.5,"hc_sinkhorn_iters":20,"hc_eps":1e-06,"rms_norm_eps":1e-06,"rope_theta":10000,"compress_rope_theta":160000,"rope_scaling":{"type":"yarn","factor":16,"beta_fast":32,"beta_slow":1,"original_max_position_embeddings":65536},"max_position_embeddings":4096,"eos_token_id":[1]})"},
    {"tokenizer", tokenizer,
     R"({"added_tokens":[{"id":9,"content":"<x>","special":true}],"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"\\s+"},"behavior":"Isolated","invert":false},{"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]},"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}})"},
    {"utf8", utf8, "a\xe4\xb8\xad\xf0\x9f\x99\x82 ab"},
    {"chat_request", chat_request,
     R"({"messages":[{"role":"system","content":"S","response_format":{"a":1.50}},{"role":"user","content":[{"type":"text","text":"Hi"}]},{"role":"assistant","content":null,"reasoning_content":"R","tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{\"a\":[1e5,NaN]}"}},{"id":"c2","function":{"name":"g","arguments":""}}]},{"role":"tool","tool_call_id":"c2","content":[{"type":"image"}]},{"role":"tool","tool_call_id":"c1","content":"x"},{"role":"latest_reminder","content":"now"},{"role":"developer","content":"D"},{"role":"user","content":"Q","task":"action"}],"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object","properties":{"a":{"maximum":18446744073709551616}},"required":["a"]}}}]})"},
    {"dsml_parser", dsml_parser,
     "1R</think>C\n\n<\uFF5CDSML\uFF5Ctool_calls>\n<\uFF5CDSML\uFF5Cinvoke name=\"f\">\n<\uFF5CDSML\uFF5Cparameter "
     "name=\"a\" string=\"true\">x</\uFF5CDSML\uFF5Cparameter>\n<\uFF5CDSML\uFF5Cparameter name=\"b\" "
     "string=\"false\">[1]</\uFF5CDSML\uFF5Cparameter>\n</\uFF5CDSML\uFF5Cinvoke>\n</"
     "\uFF5CDSML\uFF5Ctool_calls><\uFF5Cend\u2581of\u2581sentence\uFF5C>"},
};
const size_t kNumTargets = sizeof(kTargets) / sizeof(kTargets[0]);

}  // namespace tessera::fuzz
