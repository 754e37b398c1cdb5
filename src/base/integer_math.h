// SPDX-License-Identifier: Apache-2.0
#pragma once
// Whole-number arithmetic that sizes and layouts share.
#include <cstdint>

#include "base/host_device.h"

namespace tessera {

// The number of pieces of `piece` > 0 that cover `count` >= 0.
template <class Int>
TESSERA_HOST_DEVICE constexpr Int ceil_div(Int count, Int piece) {
  return (count + piece - 1) / piece;
}

// The smallest multiple of `unit` > 0 that is at least `count` >= 0.
template <class Int>
TESSERA_HOST_DEVICE constexpr Int round_up(Int count, Int unit) {
  return ceil_div(count, unit) * unit;
}

}  // namespace tessera
