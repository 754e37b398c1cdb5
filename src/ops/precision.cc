// SPDX-License-Identifier: Apache-2.0
#include "ops/precision.h"

#include <array>

namespace tessera::ops {

namespace {

constexpr std::array<std::string_view, 4> kInputNames = {"f32", "a16", "a4", "a8"};
constexpr std::array<std::string_view, 2> kCacheNames = {"exact", "fp8"};

}  // namespace

std::string_view to_string(InputMode mode) {
  return kInputNames[static_cast<size_t>(mode)];
}
std::string_view to_string(CacheMode mode) {
  return kCacheNames[static_cast<size_t>(mode)];
}

std::optional<InputMode> input_mode_from_name(std::string_view name) {
  for (size_t i = 0; i < kInputNames.size(); ++i) {
    if (kInputNames[i] == name) return static_cast<InputMode>(i);
  }
  return std::nullopt;
}

std::optional<CacheMode> cache_mode_from_name(std::string_view name) {
  for (size_t i = 0; i < kCacheNames.size(); ++i) {
    if (kCacheNames[i] == name) return static_cast<CacheMode>(i);
  }
  return std::nullopt;
}

}  // namespace tessera::ops
