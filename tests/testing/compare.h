// SPDX-License-Identifier: Apache-2.0
#pragma once
// Comparisons that fail on NaN, and say where.
#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <vector>

namespace tessera::testing {

// ||a - b|| / ||b|| in double; NaN where either holds one. Vectors of an RMS below 2^-110 count as
// of that RMS.
double relative_error(std::span<const float> a, std::span<const float> b);

// Passes only where the relative error is at most `bound`; names the worst element.
::testing::AssertionResult is_close(std::span<const float> found, std::span<const float> expected, double bound);

// Bitwise equal; names the first difference.
::testing::AssertionResult same_bits(std::span<const float> found, std::span<const float> expected);

}  // namespace tessera::testing
