// SPDX-License-Identifier: Apache-2.0
#include "text/stop_matcher.h"

#include <utility>

#include "text/marker_search.h"

namespace tessera::text {

std::string StopMatcher::push(std::string_view text) {
  if (has_matched_) return "";
  pending_ += text;
  if (const auto hit = find_first_marker(pending_, stops_)) {
    has_matched_ = true;
    matched_ = stops_[hit->marker_idx];
    std::string safe = pending_.substr(0, hit->pos);
    pending_.clear();
    return safe;
  }
  std::string safe = pending_.substr(0, pending_.size() - held_back(pending_, stops_));
  pending_.erase(0, safe.size());
  return safe;
}

std::string StopMatcher::finish() {
  return std::exchange(pending_, "");
}

}  // namespace tessera::text
