// SPDX-License-Identifier: Apache-2.0
#include "testing/compare.h"

#include <bit>
#include <cmath>

namespace tessera::testing {

::testing::AssertionResult is_close(std::span<const float> found, std::span<const float> expected, double bound) {
  if (found.size() != expected.size()) {
    return ::testing::AssertionFailure() << found.size() << " values, expected " << expected.size();
  }
  const double error = relative_error(found, expected);
  if (error <= bound) return ::testing::AssertionSuccess();
  size_t worst = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    if (!(std::fabs(found[i] - expected[i]) <= std::fabs(found[worst] - expected[worst]))) worst = i;
  }
  return ::testing::AssertionFailure() << "relative error " << error << " > " << bound << "; worst at " << worst << ": "
                                       << found[worst] << ", expected " << expected[worst];
}

namespace {

// `is_same(found, expected)` of every element.
template <class IsSame>
::testing::AssertionResult all_same(std::span<const float> found, std::span<const float> expected,
                                    const IsSame& is_same) {
  if (found.size() != expected.size()) {
    return ::testing::AssertionFailure() << found.size() << " values, expected " << expected.size();
  }
  for (size_t i = 0; i < found.size(); ++i) {
    if (!is_same(found[i], expected[i])) {
      return ::testing::AssertionFailure()
             << "first difference at " << i << ": " << found[i] << ", expected " << expected[i];
    }
  }
  return ::testing::AssertionSuccess();
}

bool is_same_bits(float found, float expected) {
  return std::bit_cast<uint32_t>(found) == std::bit_cast<uint32_t>(expected);
}

}  // namespace

::testing::AssertionResult same_bits(std::span<const float> found, std::span<const float> expected) {
  return all_same(found, expected, is_same_bits);
}

::testing::AssertionResult same_bits_or_nan(std::span<const float> found, std::span<const float> expected) {
  return all_same(found, expected, [](float a, float b) { return std::isnan(b) ? std::isnan(a) : is_same_bits(a, b); });
}

}  // namespace tessera::testing
