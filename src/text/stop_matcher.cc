// SPDX-License-Identifier: Apache-2.0
#include "text/stop_matcher.h"

#include <algorithm>
#include <utility>

namespace tessera::text {

std::string StopMatcher::push(std::string_view text) {
  if (has_matched_) return "";
  pending_ += text;
  size_t first = std::string::npos;
  for (const std::string& stop : stops_) first = std::min(first, pending_.find(stop));
  if (first != std::string::npos) {
    has_matched_ = true;
    std::string safe = pending_.substr(0, first);
    pending_.clear();
    return safe;
  }
  // The longest tail that is a proper beginning of a stop string.
  size_t held = 0;
  for (const std::string& stop : stops_) {
    for (size_t length = std::min(stop.size() - 1, pending_.size()); length > held; --length) {
      if (std::string_view(pending_).ends_with(std::string_view(stop).substr(0, length))) held = length;
    }
  }
  std::string safe = pending_.substr(0, pending_.size() - held);
  pending_.erase(0, safe.size());
  return safe;
}

std::string StopMatcher::finish() {
  return std::exchange(pending_, "");
}

}  // namespace tessera::text
