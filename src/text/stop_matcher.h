// SPDX-License-Identifier: Apache-2.0
#pragma once
// Finds stop strings in text that arrives in parts, and holds back whatever might be the beginning of one.
#include <string>
#include <string_view>
#include <vector>

namespace tessera::text {

class StopMatcher {
 public:
  // `stops` are not empty strings.
  explicit StopMatcher(std::vector<std::string> stops) : stops_(std::move(stops)) {}

  // The text that is safe to show: everything before the first stop string, less what may begin one. After a match
  // nothing more comes.
  std::string push(std::string_view text);
  // What was held back, at the end of the text.
  std::string finish();
  bool has_matched() const { return has_matched_; }
  // The stop string that was found; empty before.
  const std::string& matched() const { return matched_; }

 private:
  std::vector<std::string> stops_;
  std::string pending_, matched_;
  bool has_matched_ = false;
};

}  // namespace tessera::text
