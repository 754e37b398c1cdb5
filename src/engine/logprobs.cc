// SPDX-License-Identifier: Apache-2.0
#include "engine/logprobs.h"

#include <algorithm>
#include <numeric>

#include "engine/score.h"

namespace tessera::engine {

Logprobs logprobs_of(std::span<const float> row, int32_t id, int num_likeliest) {
  const double token = -negative_log_likelihood(row, id);
  const double normaliser = static_cast<double>(row[static_cast<size_t>(id)]) - token;
  Logprobs result{.token = static_cast<float>(token), .likeliest = {}};
  if (num_likeliest == 0) return result;
  std::vector<int32_t> ids(row.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto is_likelier = [&](int32_t a, int32_t b) {
    const float x = row[static_cast<size_t>(a)], y = row[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  };
  const auto end = ids.begin() + std::min<int64_t>(num_likeliest, static_cast<int64_t>(ids.size()));
  std::partial_sort(ids.begin(), end, ids.end(), is_likelier);
  for (auto it = ids.begin(); it != end; ++it) {
    const double logit = static_cast<double>(row[static_cast<size_t>(*it)]);
    // The token's own is the same number in both places, whatever the subtraction rounds.
    result.likeliest.push_back({*it, *it == id ? result.token : static_cast<float>(logit - normaliser)});
  }
  return result;
}

}  // namespace tessera::engine
