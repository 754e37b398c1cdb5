// SPDX-License-Identifier: Apache-2.0
#include "testing/compare.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace tessera::testing {

double relative_error(std::span<const float> a, std::span<const float> b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  if (std::isnan(difference)) return NAN;
  // Towards the end of FP32's normal range (2^-126) sums have terms that are subnormal: those have fewer bits, and
  // dot-product instructions count them as zero. Vectors of such values are judged as if their RMS were 2^-110.
  constexpr double kTiny = 0x1p-110;
  const double floor = kTiny * kTiny * static_cast<double>(std::max<size_t>(b.size(), 1));
  return std::sqrt(difference / std::max(norm, floor));
}

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

::testing::AssertionResult same_bits(std::span<const float> found, std::span<const float> expected) {
  if (found.size() != expected.size()) {
    return ::testing::AssertionFailure() << found.size() << " values, expected " << expected.size();
  }
  for (size_t i = 0; i < found.size(); ++i) {
    if (std::bit_cast<uint32_t>(found[i]) != std::bit_cast<uint32_t>(expected[i])) {
      return ::testing::AssertionFailure()
             << "first difference at " << i << ": " << found[i] << ", expected " << expected[i];
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace tessera::testing
