// SPDX-License-Identifier: Apache-2.0
#include "model/draft_names.h"

#include <algorithm>
#include <array>

#include "model/weight_spec.h"

namespace tessera::model {

namespace {

constexpr std::string_view kBlock = "mtp.", kFirstBlock = "mtp.0.";

// Of DSpark's stages alone.
constexpr std::string_view kDsparkLinear = "main_proj";
constexpr std::array<std::string_view, 4> kDsparkOthers = {
    "main_norm.weight",
    "markov_head.markov_w1.weight",
    "markov_head.markov_w2.weight",
    "confidence_head.proj.weight",
};

// What a linear map's codes, values and scales are called behind its name.
constexpr std::array<std::string_view, 9> kLinearSuffixes = {
    ".weight",        ".scale",       ".weight_scale",        ".weight_scale_inv",   ".weight_scale_2",
    ".weight_packed", ".input_scale", ".weight_global_scale", ".input_global_scale",
};

}  // namespace

DraftNames::DraftNames(const Config& config) {
  Config only_draft = config;
  only_draft.num_layers = 0;
  for (const WeightRow& row : make_weight_spec(only_draft, 1)) {
    if (!row.name.starts_with(kFirstBlock)) continue;
    const std::string name = row.name.substr(kFirstBlock.size());
    if (row.kind == WeightKind::kPlain) {
      others_.insert(name + ".weight");
    } else {
      (row.kind == WeightKind::kLinear ? linears_ : others_).insert(name);
    }
  }
  linears_.emplace(kDsparkLinear);
  others_.insert(kDsparkOthers.begin(), kDsparkOthers.end());
}

bool DraftNames::has(std::string_view tensor) const {
  if (!tensor.starts_with(kBlock)) return false;
  tensor.remove_prefix(kBlock.size());
  const size_t digits = std::min(tensor.find_first_not_of("0123456789"), tensor.size());
  if (digits == 0 || digits == tensor.size() || tensor[digits] != '.') return false;
  tensor.remove_prefix(digits + 1);
  return others_.contains(tensor) || std::any_of(kLinearSuffixes.begin(), kLinearSuffixes.end(), [&](auto suffix) {
           return tensor.ends_with(suffix) && linears_.contains(tensor.substr(0, tensor.size() - suffix.size()));
         });
}

}  // namespace tessera::model
