// SPDX-License-Identifier: Apache-2.0
#pragma once
// A linear map of many tokens by tiles of wide_sums.cuh.
#include <cstdint>

#include "device/queue.h"
#include "ops/linear/linear.h"

namespace tessera::backends::sm90 {

// By tiles of `tile_tokens` tokens (linear_choice). is_arranged: the workspace begins with these inputs as the call
// before left them, of a map of the same input by tiles of as many tokens; else they are arranged first.
void linear_wide(const ops::Linear::Desc& desc, const ops::Linear::Args& args, int32_t tile_tokens, bool is_arranged,
                 device::Queue& queue);

}  // namespace tessera::backends::sm90
