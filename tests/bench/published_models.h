// SPDX-License-Identifier: Apache-2.0
#pragma once
// Published models as plans see them, one of each for all tests of a program.
#include <map>
#include <string>
#include <utility>

#include "bench/shapes/published.h"
#include "model/parallel_plan.h"

namespace tessera::bench {

inline const model::StoredModel& stored(const char* name, ops::WeightFormat dense = ops::WeightFormat::kNvfp4) {
  static std::map<std::pair<std::string, ops::WeightFormat>, model::StoredModel> models;
  const auto [at, is_new] = models.try_emplace({name, dense});
  if (is_new) at->second = published_model(published_config(name), dense);
  return at->second;
}

}  // namespace tessera::bench
