// SPDX-License-Identifier: Apache-2.0
#pragma once
// The shapes that benchmarks run at when there is no checkpoint.
#include <string_view>

#include "model/config.h"

namespace tessera::bench {

// "flash" and "pro": DeepSeek-V4 as published (config.json of deepseek-ai/DeepSeek-V4-Flash and -Pro). "small": the
// same kinds of layers in a few megabytes. Throws kInvalidArgument for another name.
model::Config published_config(std::string_view name);

// The model with `num_layers` layers, at least 1 and at most all. Fewer than all keep the mixture rather than the
// beginning: compressed layers by turns 4 and 128, before them one with a window only from 4 layers on (where the model
// has such), one hashed layer from 2 on.
model::Config with_layers(const model::Config& config, int64_t num_layers);

}  // namespace tessera::bench
