// SPDX-License-Identifier: Apache-2.0
#include "convert/statistics_json.h"

#include <limits>
#include <nlohmann/json.hpp>

namespace tessera::convert {

namespace {

struct Count {
  const char* name;
  int64_t Statistics::*member;
};
constexpr Count kCounts[] = {
    {"matrices_rounded", &Statistics::num_rounded},
    {"matrices_exact", &Statistics::num_exact},
    {"matrices_already_nvfp4", &Statistics::num_nvfp4},
    {"matrices_kept", &Statistics::num_kept},
    {"values", &Statistics::num_values},
    {"blocks", &Statistics::num_blocks},
    {"rounded_blocks", &Statistics::num_rounded_blocks},
    {"saturated_blocks", &Statistics::num_saturated},
    {"zero_blocks", &Statistics::num_zero},
    {"vanished_blocks", &Statistics::num_vanished},
    {"inexact_mxfp4_blocks", &Statistics::num_inexact_blocks},
};

struct Sum {
  const char* name;
  double Statistics::*member;
};
constexpr Sum kSums[] = {
    {"squared_value", &Statistics::squared_value},
    {"squared_error", &Statistics::squared_error},
    {"squared_value_measured_with_ue8m0_scales", &Statistics::squared_value_e8m0},
    {"squared_error_with_ue8m0_scales", &Statistics::squared_error_e8m0},
};

}  // namespace

nlohmann::ordered_json to_json(const Statistics& statistics) {
  nlohmann::ordered_json out;
  for (const Count& count : kCounts) out[count.name] = statistics.*count.member;
  for (const Sum& sum : kSums) out[sum.name] = statistics.*sum.member;
  out["blocks_by_scale_byte"] = statistics.scales;
  return out;
}

Statistics statistics_from_json(const JsonCursor& json) {
  Statistics out;
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const Count& count : kCounts) out.*count.member = json.at(count.name).integer(0, kMost);
  for (const Sum& sum : kSums) out.*sum.member = json.at(sum.name).number(0, std::numeric_limits<double>::max());
  const JsonCursor scales = json.at("blocks_by_scale_byte");
  const auto elements = scales.elements();
  if (elements.size() != out.scales.size()) scales.fail_expected("128 counts");
  for (size_t i = 0; i < elements.size(); ++i) out.scales[i] = elements[i].integer(0, kMost);
  return out;
}

}  // namespace tessera::convert
