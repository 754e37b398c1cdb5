// SPDX-License-Identifier: Apache-2.0
#pragma once
// linear_group as maps one after another, whose one input is made ready once, after its norm where one is before it.
#include <algorithm>
#include <string>

#include "ops/linear_group/linear_group.h"

namespace tessera::backends::cuda_common {

// By what the backend says of a map, and of a norm. `why_not` has the reason where it does not.
template <class MapSupports, class NormSupports>
bool map_group_supports(const ops::LinearGroup::Desc& desc, const MapSupports& map_supports,
                        const NormSupports& norm_supports, std::string& why_not) {
  if (!ops::linear_group_reference_supports(desc, why_not)) return false;
  if (desc.norm && !norm_supports(*desc.norm, why_not)) return false;
  return std::all_of(desc.maps.begin(), desc.maps.end(),
                     [&](const ops::Linear::Desc& map) { return map_supports(map, why_not); });
}

// Of a group, the tokens of a tile that leave no multiprocessor without one in the map with the fewest rows.
template <class TileTokens>
auto map_group_tile_tokens(const ops::LinearGroup::Desc& desc, const TileTokens& tile_tokens) {
  auto fewest = tile_tokens(desc.maps.front());
  for (const ops::Linear::Desc& map : desc.maps) fewest = std::min(fewest, tile_tokens(map));
  return fewest;
}

}  // namespace tessera::backends::cuda_common
