// SPDX-License-Identifier: Apache-2.0
#pragma once
// Finding strings in text that arrives in parts. `markers` is any list of non-empty strings or string views.
#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::text {

struct MarkerHit {
  size_t pos;         // where it begins
  size_t marker_idx;  // which it is: the first of the list where several begin there
};

// The first place at or after `from` where a marker stands whole.
template <class Markers>
std::optional<MarkerHit> find_first_marker(std::string_view text, const Markers& markers, size_t from = 0) {
  std::string first_characters;
  for (const auto& marker : markers) first_characters += marker[0];
  for (size_t pos = text.find_first_of(first_characters, from); pos != std::string_view::npos;
       pos = text.find_first_of(first_characters, pos + 1)) {
    size_t marker_idx = 0;
    for (const auto& marker : markers) {
      if (text.substr(pos).starts_with(marker)) return MarkerHit{pos, marker_idx};
      ++marker_idx;
    }
  }
  return std::nullopt;
}

// Length of the longest tail of `text` that is a proper beginning of a marker: what must wait for more text.
template <class Markers>
size_t held_back(std::string_view text, const Markers& markers) {
  size_t held = 0;
  for (const std::string_view marker : markers) {
    for (size_t length = std::min(marker.size() - 1, text.size()); length > held; --length) {
      if (text.ends_with(marker.substr(0, length))) held = length;
    }
  }
  return held;
}

}  // namespace tessera::text
