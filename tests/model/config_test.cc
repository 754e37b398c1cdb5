// SPDX-License-Identifier: Apache-2.0
// config.json: both spellings, and each field missing, of the wrong kind, or out of range.
#include "model/config.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>

#include "base/error.h"
#include "testing/generated_model.h"
#include "testing/goldens.h"
#include "testing/temporary_folder.h"

namespace tessera::model {
namespace {

std::string error_of(const std::string& json) {
  try {
    parse_config(Json::parse(json, "config.json"), "config.json");
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_TRUE(error.code() == ErrorCode::kDataLoss || error.code() == ErrorCode::kUnsupported) << message;
    EXPECT_EQ(message.find("config.json"), 0u) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    return message;
  }
  return "";
}

std::string good() {
  return testing::generated_config(testing::Generated::kT1);
}

// The config with the value of one field replaced; an empty value removes the field.
std::string with(const std::string& field, const std::string& value) {
  std::string json = good();
  const std::regex pattern("\"" + field + "\": (\"[^\"]*\"|\\[[^\\]]*\\]|\\{[^}]*\\}|[^,}]+)(,\\s*)?");
  std::smatch match;
  EXPECT_TRUE(std::regex_search(json, match, pattern)) << field;
  const std::string tail = match[2];
  // The last field goes with the comma before it.
  if (value.empty() && tail.empty())
    return std::regex_replace(std::string(match.prefix()), std::regex(",\\s*$"), "") + std::string(match.suffix());
  return std::string(match.prefix()) + (value.empty() ? "" : "\"" + field + "\": " + value + tail) +
         std::string(match.suffix());
}

TEST(Config, ReadsTheOfficialSpelling) {
  const Config c = parse_config(Json::parse(good(), "config.json"), "config.json");
  EXPECT_EQ(c.hidden_size, 256);
  EXPECT_EQ(c.compress_ratios, (std::vector<int64_t>{0, 4, 128, 4, 128})) << "the draft block's entry is not a layer";
  EXPECT_EQ(c.num_hash_layers, 2);
  EXPECT_EQ(c.nope_dim(), 448);
  EXPECT_EQ(c.group_width(), 2048);
  EXPECT_EQ(c.swiglu_limit, 1.5);
  EXPECT_EQ(c.yarn.original_max_positions, 65536);
  EXPECT_EQ(c.eos_ids, (std::vector<int64_t>{1}));
}

TEST(Config, ReadsTheBundledModel) {
  const Config c = load_config(testing::tiny_model());
  EXPECT_EQ(c.vocab_size, 1024);
  EXPECT_EQ(c.max_positions, 4096);
  EXPECT_EQ(c.sliding_window, 32);
  EXPECT_EQ(c.num_mtp_layers, 0);
}

TEST(Config, ReadsTheHuggingFaceSpelling) {
  const Config c = parse_config(
      Json::parse(
          R"({"model_type":"deepseek_v4","vocab_size":1024,"hidden_size":256,"num_hidden_layers":3,"num_attention_heads":4,
    "head_dim":512,"partial_rotary_factor":0.125,"q_lora_rank":128,"o_groups":2,"o_lora_rank":64,"sliding_window":32,
    "layer_types":["sliding_attention","heavily_compressed_attention","compressed_sparse_attention"],
    "compress_rates":{"compressed_sparse_attention":4,"heavily_compressed_attention":128},
    "mlp_layer_types":["hash_moe","moe","moe"],"index_n_heads":8,"index_head_dim":128,"index_topk":16,"n_routed_experts":16,
    "num_experts_per_tok":4,"moe_intermediate_size":128,"routed_scaling_factor":1.5,"hc_sinkhorn_iters":20,"hc_eps":1e-06,
    "rms_norm_eps":1e-06,"rope_parameters":{"main":{"rope_theta":10000.0},"compress":{"rope_theta":160000.0,"rope_type":"yarn",
    "factor":16,"beta_fast":32,"beta_slow":1,"original_max_position_embeddings":256}},"max_position_embeddings":4096,"eos_token_id":[1,2]})",
          "config.json"),
      "config.json");
  EXPECT_EQ(c.compress_ratios, (std::vector<int64_t>{0, 128, 4}));
  EXPECT_EQ(c.num_hash_layers, 1);
  EXPECT_EQ(c.rope_dim, 64);
  EXPECT_EQ(c.compress_rope_theta, 160000);
  EXPECT_EQ(c.yarn.original_max_positions, 256);
  EXPECT_EQ(c.eos_ids.size(), 2u);
}

TEST(Config, RequiredFieldsAreMissedByName) {
  for (const char* field : {"model_type",
                            "vocab_size",
                            "hidden_size",
                            "num_hidden_layers",
                            "num_attention_heads",
                            "head_dim",
                            "q_lora_rank",
                            "o_groups",
                            "o_lora_rank",
                            "sliding_window",
                            "compress_ratios",
                            "index_n_heads",
                            "index_head_dim",
                            "index_topk",
                            "n_routed_experts",
                            "num_experts_per_tok",
                            "moe_intermediate_size",
                            "routed_scaling_factor",
                            "hc_sinkhorn_iters",
                            "hc_eps",
                            "rms_norm_eps",
                            "rope_theta",
                            "compress_rope_theta",
                            "rope_scaling",
                            "max_position_embeddings",
                            "eos_token_id",
                            "num_hash_layers",
                            "qk_rope_head_dim"}) {
    const std::string message = error_of(with(field, ""));
    const bool is_named =
        message.find(field) != std::string::npos ||
        (std::string(field) == "qk_rope_head_dim" && message.find("partial_rotary_factor") != std::string::npos);
    EXPECT_TRUE(is_named) << field << ": " << message;
  }
}

TEST(Config, WrongKindsAndRangesAreRefusedByName) {
  for (const char* field :
       {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups",
        "o_lora_rank", "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "n_routed_experts",
        "num_experts_per_tok", "moe_intermediate_size", "hc_sinkhorn_iters", "max_position_embeddings"}) {
    for (const char* value : {"0", "-1", "1.5", "1e30", "9223372036854775807", "\"x\"", "[]", "{}", "true"}) {
      EXPECT_NE(error_of(with(field, value)).find(field), std::string::npos) << field << " = " << value;
    }
  }
  for (const char* field : {"routed_scaling_factor", "rms_norm_eps", "rope_theta", "compress_rope_theta"}) {
    for (const char* value : {"0", "-1", "1e300", "\"x\"", "true"})
      EXPECT_NE(error_of(with(field, value)), "") << field << " = " << value;
  }
  const std::pair<const char*, const char*> others[] = {{"model_type", "\"llama\""},
                                                        {"model_type", "\"deepseek_v41\""},
                                                        {"scoring_func", "\"softmax\""},
                                                        {"hidden_act", "\"gelu\""},
                                                        {"topk_method", "\"greedy\""},
                                                        {"tie_word_embeddings", "true"},
                                                        {"attention_bias", "true"},
                                                        {"num_key_value_heads", "8"},
                                                        {"n_shared_experts", "2"},
                                                        {"hc_mult", "2"},
                                                        {"compress_ratios", "[0, 4]"},
                                                        {"compress_ratios", "[0, 4, 128, 4, 7, 0]"},
                                                        {"compress_ratios", "[0, 4, 128, 4, -4, 0]"},
                                                        {"compress_ratios", "{}"},
                                                        {"o_groups", "3"},
                                                        {"index_head_dim", "96"},
                                                        {"index_head_dim", "32"},
                                                        {"num_experts_per_tok", "9"},
                                                        {"n_routed_experts", "60000"},  // too many of all layers
                                                        {"num_hash_layers", "6"},
                                                        {"num_hash_layers", "-1"},
                                                        {"qk_rope_head_dim", "63"},
                                                        {"qk_rope_head_dim", "1024"},
                                                        {"swiglu_limit", "-1"},
                                                        {"eos_token_id", "512"},
                                                        {"eos_token_id", "[1, 512]"},
                                                        {"bos_token_id", "-1"},
                                                        {"num_nextn_predict_layers", "-1"},
                                                        {"rope_scaling", "{\"type\": \"linear\"}"},
                                                        {"rope_scaling", "{\"type\": \"yarn\"}"},
                                                        {"norm_topk_prob", "1"}};
  for (const auto& [field, value] : others) EXPECT_NE(error_of(with(field, value)), "") << field << " = " << value;
  EXPECT_NE(error_of(with("model_type", "\"deepseek_v41\"")).find("another architecture"), std::string::npos);
}

TEST(Config, FilesOfTheFixturesAreRead) {
  const std::string shared = testing::shared_data();
  if (shared.empty()) GTEST_SKIP() << "TESSERA_SHARED_DATA does not name the fixtures";
  for (const auto& folder : std::filesystem::directory_iterator(shared + "/formats")) {
    if (folder.is_directory()) {
      EXPECT_EQ(load_config(folder.path().string()).num_layers, 5) << folder.path();
    }
  }
}

}  // namespace
}  // namespace tessera::model
