// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a conversion says about itself, in the fields that NVIDIA Model Optimizer writes for NVFP4 checkpoints of
// DeepSeek-V4, so that other programs choose the right reader. Source: the exporter's config.json and
// hf_quant_config.json (NVIDIA/Model-Optimizer, examples/deepseek/deepseek_v4).
#include <string>

#include "convert/plan.h"

namespace tessera::convert {

struct ConvertedConfigs {
  std::string config;           // config.json: the source's, with another quantization_config
  std::string hf_quant_config;  // hf_quant_config.json
};

// `source` is the text of the source's config.json, `where` names it. Fields of the source's FP8 quantization_config
// stay where FP8 blocks remain. Throws kDataLoss.
ConvertedConfigs converted_configs(const std::string& source, const std::string& where, const Plan& plan,
                                   const std::string& version);

}  // namespace tessera::convert
