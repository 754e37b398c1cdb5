// SPDX-License-Identifier: Apache-2.0
#pragma once
// Choices of the experts' kernels (moe.cu): plain numbers, for them and for predictions of their time (bench/plan).
#include <cstdint>

namespace tessera::backends::cuda {

// So many slots a warp groups by itself, in every thread block anew: that takes less time than a launch. More have a
// kernel of their own.
constexpr int64_t kFewExpertSlots = 32;

}  // namespace tessera::backends::cuda
