// SPDX-License-Identifier: Apache-2.0
#include "convert/statistics.h"

#include <cmath>

namespace tessera::convert {

namespace {

double relative(double error, double value) {
  return value > 0 ? std::sqrt(error / value) : 0;
}

}  // namespace

void Statistics::add(const Statistics& other) {
  num_rounded += other.num_rounded;
  num_exact += other.num_exact;
  num_nvfp4 += other.num_nvfp4;
  num_kept += other.num_kept;
  num_values += other.num_values;
  num_blocks += other.num_blocks;
  num_rounded_blocks += other.num_rounded_blocks;
  num_saturated += other.num_saturated;
  num_zero += other.num_zero;
  num_vanished += other.num_vanished;
  num_inexact_blocks += other.num_inexact_blocks;
  squared_value += other.squared_value;
  squared_error += other.squared_error;
  squared_value_e8m0 += other.squared_value_e8m0;
  squared_error_e8m0 += other.squared_error_e8m0;
  for (size_t i = 0; i < scales.size(); ++i) scales[i] += other.scales[i];
}

double Statistics::relative_error() const {
  return relative(squared_error, squared_value);
}

double Statistics::relative_error_e8m0() const {
  return relative(squared_error_e8m0, squared_value_e8m0);
}

void add(FamilyStatistics& sum, const FamilyStatistics& other) {
  for (size_t i = 0; i < sum.size(); ++i) sum[i].add(other[i]);
}

}  // namespace tessera::convert
