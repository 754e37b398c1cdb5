// SPDX-License-Identifier: Apache-2.0
#pragma once
// Comparisons that fail on NaN, and say where.
#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <vector>

#include "verify/compare.h"

namespace tessera::testing {

using verify::relative_error;

// Passes only where the relative error is at most `bound`; names the worst element.
::testing::AssertionResult is_close(std::span<const float> found, std::span<const float> expected, double bound);

// Bitwise equal; names the first difference.
::testing::AssertionResult same_bits(std::span<const float> found, std::span<const float> expected);
// The same bits, or both NaN: which of one's bits a sum keeps, no contract says.
::testing::AssertionResult same_bits_or_nan(std::span<const float> found, std::span<const float> expected);

}  // namespace tessera::testing
