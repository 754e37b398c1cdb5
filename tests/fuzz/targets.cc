// SPDX-License-Identifier: Apache-2.0
#include "fuzz/targets.h"

#include <string>

#include "base/error.h"
#include "base/strings.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/shard_index.h"
#include "model/config.h"
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
};
const size_t kNumTargets = sizeof(kTargets) / sizeof(kTargets[0]);

}  // namespace tessera::fuzz
