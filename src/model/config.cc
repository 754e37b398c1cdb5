// SPDX-License-Identifier: Apache-2.0
#include "model/config.h"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "base/strings.h"

namespace tessera::model {

namespace {

constexpr uint64_t kMaxConfigBytes = 1 << 20;
// No dimension of a real model comes near; products of two stay far from overflow.
constexpr int64_t kMaxDim = 1 << 24;
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxExperts = 1 << 18;  // of all layers, each with tensors of its own to be listed; Pro has 23,424

int64_t dim(const JsonCursor& root, const char* key, int64_t min = 1, int64_t max = kMaxDim) {
  return root.at(key).integer(min, max);
}

// A field that may only have one value; absent is fine.
void require(const JsonCursor& root, const char* key, std::string_view only) {
  if (const auto field = root.find(key)) {
    if (field->string() != only) {
      fail(ErrorCode::kUnsupported, fmt::format("{}: field {}: expected \"{}\", found \"{}\"", root.file(), key, only,
                                                printable(field->string(), 60)));
    }
  }
}

void require_false(const JsonCursor& root, const char* key) {
  if (const auto field = root.find(key); field && field->boolean()) {
    fail(ErrorCode::kUnsupported, fmt::format("{}: field {}: expected false, found true", root.file(), key));
  }
}

void check_model_type(const JsonCursor& root) {
  const std::string& type = root.at("model_type").string();
  if (type == "deepseek_v41") {
    fail(ErrorCode::kUnsupported,
         fmt::format(
             "{}: field model_type: expected \"deepseek_v4\", found \"deepseek_v41\": V4.1 is another architecture",
             root.file()));
  }
  if (type != "deepseek_v4") {
    fail(ErrorCode::kUnsupported,
         fmt::format("{}: field model_type: expected \"deepseek_v4\", found \"{}\"", root.file(), printable(type, 60)));
  }
  require(root, "scoring_func", "sqrtsoftplus");
  require(root, "hidden_act", "silu");
  require(root, "topk_method", "noaux_tc");
  require_false(root, "tie_word_embeddings");
  require_false(root, "attention_bias");
  require_false(root, "mlp_bias");
}

std::vector<int64_t> parse_ratios(const JsonCursor& root, int64_t num_layers) {
  std::vector<int64_t> ratios;
  const auto check = [](const JsonCursor& field, int64_t ratio) {
    if (ratio != 0 && ratio != 4 && ratio != 128) field.fail_expected("0, 4 or 128");
    return ratio;
  };
  if (const auto field = root.find("compress_ratios")) {
    for (const JsonCursor& item : field->elements()) ratios.push_back(check(item, item.integer(0, 1 << 20)));
    // Further entries belong to draft blocks.
    if (static_cast<int64_t>(ratios.size()) < num_layers) {
      field->fail_expected(fmt::format("at least num_hidden_layers = {} entries", num_layers));
    }
    ratios.resize(static_cast<size_t>(num_layers));
    return ratios;
  }
  const auto types = root.find("layer_types");
  if (!types) fail_data(root.file(), "field compress_ratios", "it, or layer_types", "neither");
  const auto rates = root.find("compress_rates");
  for (const JsonCursor& item : types->elements()) {
    const std::string& type = item.string();
    if (type == "sliding_attention") {
      ratios.push_back(0);
    } else if (type == "compressed_sparse_attention" || type == "heavily_compressed_attention") {
      const int64_t usual = type == "compressed_sparse_attention" ? 4 : 128;
      const auto rate = rates ? rates->find(type) : std::nullopt;
      ratios.push_back(rate ? check(*rate, rate->integer(1, 1 << 20)) : usual);
    } else {
      item.fail_expected("sliding_attention, compressed_sparse_attention or heavily_compressed_attention");
    }
  }
  if (static_cast<int64_t>(ratios.size()) != num_layers) {
    types->fail_expected(fmt::format("num_hidden_layers = {} entries", num_layers));
  }
  return ratios;
}

int64_t parse_hash_layers(const JsonCursor& root, int64_t num_layers) {
  for (const char* key : {"num_hash_layers", "n_hash_layers"}) {
    if (const auto field = root.find(key)) return field->integer(0, num_layers);
  }
  const auto types = root.find("mlp_layer_types");
  if (!types) fail_data(root.file(), "field num_hash_layers", "it, or mlp_layer_types", "neither");
  int64_t count = 0, seen = 0;
  for (const JsonCursor& item : types->elements()) {
    const bool is_hashed = item.string() == "hash_moe";
    if (!is_hashed && item.string() != "moe") item.fail_expected("hash_moe or moe");
    if (is_hashed && count != seen) item.fail_expected("hash_moe only in the first layers");
    count += is_hashed ? 1 : 0;
    ++seen;
  }
  if (seen != num_layers) types->fail_expected(fmt::format("num_hidden_layers = {} entries", num_layers));
  return count;
}

int64_t parse_rope_dim(const JsonCursor& root, int64_t head_dim) {
  int64_t rope_dim = 0;
  if (const auto field = root.find("qk_rope_head_dim")) {
    rope_dim = field->integer(2, head_dim);
  } else {
    const auto share = root.find("partial_rotary_factor");
    if (!share) fail_data(root.file(), "field qk_rope_head_dim", "it, or partial_rotary_factor", "neither");
    const double factor = share->number(0, 1);
    rope_dim = static_cast<int64_t>(std::lround(factor * static_cast<double>(head_dim)));
  }
  if (rope_dim < 2 || rope_dim % 2 != 0) {
    fail_data(root.file(), "field qk_rope_head_dim", "an even number", fmt::format("{}", rope_dim));
  }
  return rope_dim;
}

void parse_yarn(const JsonCursor& scaling, ops::Yarn& yarn) {
  for (const char* key : {"type", "rope_type"}) {
    if (const auto type = scaling.find(key); type && type->string() != "yarn") type->fail_expected("\"yarn\"");
  }
  yarn.factor = scaling.at("factor").number(1, 1e6);
  yarn.beta_fast = scaling.at("beta_fast").number(1e-3, 1e6);
  yarn.beta_slow = scaling.at("beta_slow").number(1e-3, 1e6);
  yarn.original_max_positions = scaling.at("original_max_position_embeddings").number(1, 1e12);
}

void parse_rope(const JsonCursor& root, bool has_compressed, Config& config) {
  const auto parameters = root.find("rope_parameters");
  const auto group = [&](const char* name) { return parameters ? parameters->find(name) : std::nullopt; };
  const auto theta = [&](const char* key, const char* name) {
    if (const auto field = root.find(key)) return field->number(1, 1e12);
    if (const auto of = group(name)) return of->at("rope_theta").number(1, 1e12);
    return root.at(key).number(1, 1e12);  // reports the missing field
  };
  config.rope_theta = theta("rope_theta", "main");
  if (!has_compressed) return;
  config.compress_rope_theta = theta("compress_rope_theta", "compress");
  const auto scaling = root.find("rope_scaling");
  const auto compress = group("compress");
  parse_yarn(scaling ? *scaling : compress ? *compress : root.at("rope_scaling"), config.yarn);
}

std::vector<int64_t> parse_ids(const JsonCursor& field, int64_t vocab_size) {
  std::vector<int64_t> ids;
  if (field.value().kind() == Json::Kind::kArray) {
    for (const JsonCursor& item : field.elements()) ids.push_back(item.integer(0, vocab_size - 1));
  } else {
    ids.push_back(field.integer(0, vocab_size - 1));
  }
  return ids;
}

void check_consistency(const JsonCursor& root, const Config& c) {
  if (c.num_heads % c.o_groups != 0) {
    root.at("o_groups").fail_expected(fmt::format("a divisor of num_attention_heads = {}", c.num_heads));
  }
  if (c.index_head_dim != 0) {
    if ((c.index_head_dim & (c.index_head_dim - 1)) != 0) root.at("index_head_dim").fail_expected("a power of two");
    if (c.index_head_dim < c.rope_dim) {
      root.at("index_head_dim").fail_expected(fmt::format("at least qk_rope_head_dim = {}", c.rope_dim));
    }
  }
}

std::string path_in(const std::string& directory, const char* name) {
  return (std::filesystem::path(directory) / name).string();
}

}  // namespace

Config parse_config(const Json& json, const std::string& file) {
  const JsonCursor root(json, file);
  check_model_type(root);
  Config c;
  c.vocab_size = dim(root, "vocab_size");
  c.hidden_size = dim(root, "hidden_size", 1, 1 << 20);
  c.num_layers = dim(root, "num_hidden_layers", 1, kMaxLayers);
  c.num_heads = dim(root, "num_attention_heads", 1, 1 << 16);
  if (const auto kv_heads = root.find("num_key_value_heads")) kv_heads->integer(1, 1);
  c.head_dim = dim(root, "head_dim", 2, 1 << 16);
  c.rope_dim = parse_rope_dim(root, c.head_dim);
  c.q_lora_rank = dim(root, "q_lora_rank", 1, 1 << 20);
  c.o_groups = dim(root, "o_groups", 1, 1 << 16);
  c.o_lora_rank = dim(root, "o_lora_rank", 1, 1 << 20);
  c.sliding_window = dim(root, "sliding_window", 1, 1 << 20);
  c.compress_ratios = parse_ratios(root, c.num_layers);
  bool has_indexer = false, has_compressed = false;
  for (const int64_t ratio : c.compress_ratios) {
    has_indexer = has_indexer || ratio == 4;
    has_compressed = has_compressed || ratio != 0;
  }
  if (has_indexer) {
    c.index_num_heads = dim(root, "index_n_heads", 1, 1 << 16);
    c.index_head_dim = dim(root, "index_head_dim", 2, 1 << 16);
    c.index_topk = dim(root, "index_topk", 1, 1 << 20);
  }
  c.num_experts = dim(root, "n_routed_experts", 1, std::min<int64_t>(1 << 16, kMaxExperts / c.num_layers));
  c.experts_per_token = dim(root, "num_experts_per_tok", 1, c.num_experts);
  c.expert_inner = dim(root, "moe_intermediate_size", 1, 1 << 20);
  if (const auto shared = root.find("n_shared_experts")) shared->integer(1, 1);
  c.num_hash_layers = parse_hash_layers(root, c.num_layers);
  c.routed_scaling_factor = root.at("routed_scaling_factor").number(1e-6, 1e6);
  if (const auto limit = root.find("swiglu_limit")) c.swiglu_limit = limit->number(0, 1e6);
  if (const auto norm = root.find("norm_topk_prob")) c.norm_topk_prob = norm->boolean();
  if (const auto streams = root.find("hc_mult")) streams->integer(4, 4);
  c.hc_sinkhorn_iters = dim(root, "hc_sinkhorn_iters", 1, 1000);
  c.hc_eps = root.at("hc_eps").number(0, 1);
  c.rms_norm_eps = root.at("rms_norm_eps").number(1e-30, 1);
  parse_rope(root, has_compressed, c);
  c.max_positions = dim(root, "max_position_embeddings", 1, int64_t{1} << 30);
  if (const auto draft = root.find("num_nextn_predict_layers")) c.num_mtp_layers = draft->integer(0, 64);
  c.has_dspark = root.find("dspark_block_size").has_value();
  if (const auto bos = root.find("bos_token_id")) c.bos_id = bos->integer(0, c.vocab_size - 1);
  c.eos_ids = parse_ids(root.at("eos_token_id"), c.vocab_size);
  check_consistency(root, c);
  return c;
}

uint64_t Config::fingerprint() const {
  const std::string facts = fmt::format(
      "{} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {}", vocab_size,
      hidden_size, num_layers, num_heads, head_dim, rope_dim, q_lora_rank, o_groups, o_lora_rank, sliding_window,
      fmt::join(compress_ratios, ","), index_num_heads, index_head_dim, index_topk, num_experts, experts_per_token,
      expert_inner, num_hash_layers, routed_scaling_factor, swiglu_limit, norm_topk_prob, hc_sinkhorn_iters, hc_eps,
      rms_norm_eps, rope_theta, compress_rope_theta, yarn.factor, yarn.beta_fast, yarn.beta_slow,
      yarn.original_max_positions, max_positions, bos_id);
  return XXH3_64bits(facts.data(), facts.size());
}

Config load_config(const std::string& directory) {
  const std::string path = path_in(directory, "config.json");
  if (!file_exists(path)) {
    fail(ErrorCode::kNotFound,
         fmt::format("{}: no such file; a model is a folder with config.json, tokenizer.json and *.safetensors",
                     printable(path)));
  }
  return parse_config(Json::parse(read_file(path, kMaxConfigBytes), path), path);
}

}  // namespace tessera::model
