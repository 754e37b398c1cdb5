// SPDX-License-Identifier: Apache-2.0
#include "convert/config_json.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "base/json.h"

namespace tessera::convert {

namespace {

using OrderedJson = nlohmann::ordered_json;

// Modules are named as the exporter names them: experts and shared experts of a layer as one.
std::string module_of(const PlannedMatrix& matrix) {
  const bool is_grouped = matrix.family == Family::kExperts || matrix.family == Family::kShared;
  const std::string_view group = matrix.family == Family::kExperts ? ".experts" : ".shared_experts";
  return is_grouped ? matrix.name.substr(0, matrix.name.find(group) + group.size()) : matrix.name;
}

// What is not NVFP4: patterns over all layers for what never is, and by name for what the conversion left.
OrderedJson ignored_modules(const Plan& plan) {
  std::set<std::string> kept;
  bool has_draft = false, keeps_draft = true;
  for (const checkpoint::TensorSpec& tensor : plan.tensors) has_draft |= tensor.name.starts_with("mtp.");
  for (const Job& job : plan.jobs) {
    for (const PlannedMatrix& matrix : job.matrices) keeps_draft &= !matrix.name.starts_with("mtp.");
  }
  for (const KeptMatrix& matrix : plan.kept) {
    if (has_draft && keeps_draft && matrix.name.starts_with("mtp.")) continue;
    const size_t layer_end = matrix.name.find('.', matrix.name.find('.') + 1);
    const std::string behind_layer = layer_end == std::string::npos ? matrix.name : matrix.name.substr(layer_end);
    switch (matrix.family) {
      case Family::kExperts:
        kept.insert("*.ffn.experts.*");
        break;
      case Family::kShared:
        kept.insert("*.ffn.shared_experts.*");
        break;
      case Family::kHead:
        kept.insert("head");
        break;
      default:
        kept.insert("*" + behind_layer);
    }
  }
  for (const char* always : {"embed", "*.attn.indexer.weights_proj", "*.ffn.gate", "*hc_*"}) kept.insert(always);
  if (has_draft && keeps_draft) kept.insert("mtp.*");
  return kept;
}

}  // namespace

ConvertedConfigs converted_configs(const std::string& source, const std::string& where, const Plan& plan,
                                   const std::string& version) {
  Json::parse(source, where);  // strict: no duplicate keys, bounded depth
  OrderedJson config = OrderedJson::parse(source, nullptr, false);
  if (!config.is_object()) fail_data(where, "file", "a JSON object", "something else");
  const OrderedJson before = config.contains("quantization_config") && config["quantization_config"].is_object()
                                 ? config["quantization_config"]
                                 : OrderedJson::object();
  const OrderedJson group = {{"quant_algo", "NVFP4"}, {"group_size", 16}};
  OrderedJson layers = OrderedJson::object();
  std::set<std::string> seen;
  bool has_experts = false;
  for (const Job& job : plan.jobs) {
    for (const PlannedMatrix& matrix : job.matrices) {
      has_experts |= matrix.family == Family::kExperts;
      const std::string module = module_of(matrix);
      if (seen.insert(module).second) layers.push_back({module, group});
    }
  }
  const OrderedJson producer = {{"name", "tessera"}, {"version", version}};
  const OrderedJson ignore = ignored_modules(plan);
  const OrderedJson moe_algorithm = has_experts ? OrderedJson("NVFP4") : OrderedJson(nullptr);
  const OrderedJson number = {{"num_bits", 4}, {"type", "float"}, {"group_size", 16}, {"dynamic", false}};

  OrderedJson after = OrderedJson::object();
  if (plan.keeps_fp8) {
    after["quant_method"] = "fp8";
    for (const char* key : {"fmt", "scale_fmt", "weight_block_size", "activation_scheme"}) {
      if (before.contains(key)) after[key] = before[key];
    }
  } else {
    after["quant_method"] = "modelopt";
  }
  after["quant_algo"] = "MIXED_PRECISION";
  after["moe_quant_algo"] = moe_algorithm;
  after["kv_cache_quant_algo"] = nullptr;
  after["group_size"] = 16;
  after["producer"] = producer;
  after["config_groups"] = {{"group_0",
                             {{"input_activations", plan.has_input_scale ? number : OrderedJson(nullptr)},
                              {"weights", number},
                              {"targets", {"Linear"}}}}};
  after["quantized_layers"] = layers;
  after["ignore"] = ignore;
  config["quantization_config"] = std::move(after);

  const OrderedJson hf = {{"producer", producer},
                          {"quantization",
                           {{"quant_algo", "MIXED_PRECISION"},
                            {"kv_cache_quant_algo", nullptr},
                            {"group_size", 16},
                            {"quantized_layers", layers},
                            {"exclude_modules", ignore}}}};
  return {config.dump(1) + "\n", hf.dump(1) + "\n"};
}

}  // namespace tessera::convert
