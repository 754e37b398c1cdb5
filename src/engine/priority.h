// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>

namespace tessera::engine {

// Of a request. Higher goes first; docs/contracts/engine_loop.md says how far.
enum class Priority : uint8_t { kHigh, kNormal, kLow };

}  // namespace tessera::engine
