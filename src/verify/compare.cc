// SPDX-License-Identifier: Apache-2.0
#include "verify/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "ops/reference_rows.h"

namespace tessera::verify {

namespace {

// Towards the end of FP32's normal range (2^-126) sums have terms that are subnormal: those have fewer bits, and
// dot-product instructions count them as zero. Vectors of such values are judged as if their RMS were 2^-110.
constexpr double kTiny = 0x1p-110;

std::vector<float> floats_of(const TensorView& view) {
  std::vector<float> out(static_cast<size_t>(view.shape.num_elements()));
  ops::load_floats(view, 0, view.shape.num_elements(), out.data());
  return out;
}

// Values, or bytes of smaller ones.
int64_t num_different(const TensorView& found, const TensorView& expected) {
  const int64_t bytes = expected.num_bytes(), step = std::max<int64_t>(1, dtype_bits(expected.dtype) / 8);
  const auto *a = found.as<unsigned char>(), *b = expected.as<unsigned char>();
  if (bytes == 0 || std::memcmp(a, b, static_cast<size_t>(bytes)) == 0) return 0;
  int64_t count = 0;
  for (int64_t i = 0; i < bytes; i += step) count += std::memcmp(a + i, b + i, static_cast<size_t>(step)) != 0;
  return count;
}

Difference compare_bits(const TensorView& found, const TensorView& expected) {
  const int64_t bytes = expected.num_bytes();
  const auto *a = found.as<unsigned char>(), *b = expected.as<unsigned char>();
  if (bytes == 0 || std::memcmp(a, b, static_cast<size_t>(bytes)) == 0) return {};
  int64_t at = 0;
  while (a[at] == b[at]) ++at;
  const int64_t element = at * 8 / dtype_bits(expected.dtype);
  std::string what = fmt::format("element {} has other bits", element);
  if (expected.dtype == DType::kI32)
    what += fmt::format(": {}, expected {}", found.as<int32_t>()[element], expected.as<int32_t>()[element]);
  return {0, std::numeric_limits<double>::infinity(), what};
}

// The first value of a BF16 output that is further off than one value may be; -1: none.
int64_t first_outlier(std::span<const float> a, std::span<const float> b, int64_t width) {
  for (size_t row = 0; row < b.size(); row += static_cast<size_t>(width)) {
    double squares = 0;
    for (size_t i = row; i < row + static_cast<size_t>(width); ++i) {
      squares += std::pow(static_cast<double>(b[i]), 2);
    }
    const double rms = std::max(kTiny, std::sqrt(squares / static_cast<double>(width)));
    for (size_t i = row; i < row + static_cast<size_t>(width); ++i) {
      const double difference = std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
      if (!(difference <= 0x1p-7 * std::fabs(static_cast<double>(b[i])) + kBf16Bound * rms)) {
        return static_cast<int64_t>(i);
      }
    }
  }
  return -1;
}

// The first row whose relative error alone is more than `bound`; -1: none.
int64_t first_bad_row(std::span<const float> a, std::span<const float> b, size_t width, double bound) {
  for (size_t at = 0; at < b.size(); at += width) {
    if (!(relative_error(a.subspan(at, width), b.subspan(at, width)) <= bound)) return static_cast<int64_t>(at / width);
  }
  return -1;
}

Difference difference_of(const TensorView& found, const TensorView& expected, Rule rule, double bound) {
  if (rule == Rule::kBits) return compare_bits(found, expected);
  if (expected.shape.num_elements() == 0) return {};
  std::vector<float> a = floats_of(found), b = floats_of(expected);
  for (size_t i = 0; i < b.size(); ++i) {
    if (std::bit_cast<uint32_t>(a[i]) == std::bit_cast<uint32_t>(b[i]) && !std::isfinite(b[i])) a[i] = b[i] = 0;
    if (std::isfinite(a[i]) && std::isfinite(b[i])) continue;
    return {0, std::numeric_limits<double>::infinity(), fmt::format("value {} is {}, expected {}", i, a[i], b[i])};
  }
  Difference difference{0, relative_error(a, b), ""};
  if (difference.error > bound) {
    size_t worst = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      if (std::fabs(a[i] - b[i]) > std::fabs(a[worst] - b[worst])) worst = i;
    }
    difference.what = fmt::format("relative error {:.2g} > {:.2g}; worst at {}: {}, expected {}", difference.error,
                                  bound, worst, a[worst], b[worst]);
    return difference;
  }
  const int64_t width = expected.shape[expected.shape.rank() - 1];
  if (rule == Rule::kRows) {
    const int64_t row = first_bad_row(a, b, static_cast<size_t>(width), 2 * bound);
    if (row >= 0) difference.what = fmt::format("row {} is further off than {:.2g}", row, 2 * bound);
    return difference;
  }
  if (rule != Rule::kValues || expected.dtype != DType::kBF16) return difference;
  const int64_t outlier = first_outlier(a, b, width);
  if (outlier >= 0) {
    difference.what = fmt::format("value {} is {}, expected {}: further off than 2^-7 of it and 4e-3 of its row's RMS",
                                  outlier, a[static_cast<size_t>(outlier)], b[static_cast<size_t>(outlier)]);
  }
  return difference;
}

}  // namespace

double relative_error(std::span<const float> a, std::span<const float> b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  if (std::isnan(difference)) return NAN;
  const double floor = kTiny * kTiny * static_cast<double>(std::max<size_t>(b.size(), 1));
  return std::sqrt(difference / std::max(norm, floor));
}

Difference compare(const TensorView& found, const TensorView& expected, Rule rule, double bound) {
  Difference difference = difference_of(found, expected, rule, bound);
  difference.num_different = num_different(found, expected);
  return difference;
}

}  // namespace tessera::verify
