// SPDX-License-Identifier: Apache-2.0
#include "convert/family.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/strings.h"

namespace tessera::convert {

namespace {

constexpr std::array<std::string_view, kNumFamilies> kNames = {"experts",    "shared",  "attention",
                                                               "compressor", "indexer", "head"};
constexpr std::array<std::string_view, 5> kAttention = {"wq_a", "wq_b", "wkv", "wo_a", "wo_b"};
constexpr std::array<std::string_view, 2> kCompressor = {"wkv", "wgate"};

template <size_t N>
bool contains(const std::array<std::string_view, N>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Removes "PREFIX" + digits + "."; false where `name` does not begin so.
bool drop_numbered(std::string_view& name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return false;
  const size_t digits_end = name.find_first_not_of("0123456789", prefix.size());
  if (digits_end == prefix.size() || digits_end == std::string_view::npos || name[digits_end] != '.') return false;
  name.remove_prefix(digits_end + 1);
  return true;
}

bool drop(std::string_view& name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return false;
  name.remove_prefix(prefix.size());
  return true;
}

bool is_expert_matrix(std::string_view name) {
  return name == "w1" || name == "w2" || name == "w3";
}

}  // namespace

std::string_view to_string(Family family) {
  return kNames[static_cast<size_t>(family)];
}

FamilySet parse_families(std::string_view text) {
  FamilySet set;
  for (const std::string_view item : split(text, ',')) {
    const auto at = std::find(kNames.begin(), kNames.end(), item);
    if (item == "all") {
      set.set();
    } else if (at != kNames.end()) {
      set.set(static_cast<size_t>(at - kNames.begin()));
    } else {
      fail(ErrorCode::kInvalidArgument, fmt::format("families: expected some of {} or all, found \"{}\"",
                                                    fmt::join(kNames, ","), printable(item, 40)));
    }
  }
  return set;
}

std::string to_string(const FamilySet& families) {
  std::string out;
  for (size_t i = 0; i < kNumFamilies; ++i) {
    if (families.test(i)) out += (out.empty() ? "" : ",") + std::string(kNames[i]);
  }
  return out;
}

std::optional<Family> family_of(std::string_view name) {
  if (name == "head") return Family::kHead;
  if (!drop_numbered(name, "layers.") && !drop_numbered(name, "mtp.")) return std::nullopt;
  if (drop_numbered(name, "ffn.experts.")) {
    return is_expert_matrix(name) ? std::optional(Family::kExperts) : std::nullopt;
  }
  if (drop(name, "ffn.shared_experts.")) {
    return is_expert_matrix(name) ? std::optional(Family::kShared) : std::nullopt;
  }
  if (!drop(name, "attn.")) return std::nullopt;
  if (name == "indexer.wq_b") return Family::kIndexer;
  if (drop(name, "compressor.") || drop(name, "indexer.compressor.")) {
    return contains(kCompressor, name) ? std::optional(Family::kCompressor) : std::nullopt;
  }
  return contains(kAttention, name) ? std::optional(Family::kAttention) : std::nullopt;
}

}  // namespace tessera::convert
