// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/shard_index.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "base/json.h"
#include "base/strings.h"

namespace tessera::checkpoint {

std::vector<std::pair<std::string, std::string>> parse_shard_index(const std::string& text, const std::string& where) {
  const Json root = Json::parse(text, where);
  std::vector<std::pair<std::string, std::string>> map;
  for (const auto& [tensor, file] : JsonCursor(root, where).at("weight_map").members()) {
    const std::string& name = file.string();
    // A hostile index must not reach outside the folder.
    if (name.empty() || name.front() == '.' || name.find('/') != std::string::npos ||
        name.find('\0') != std::string::npos || !name.ends_with(".safetensors")) {
      fail_data(where, fmt::format("weight_map: tensor {}", printable(tensor, 160)),
                "a plain file name ending in .safetensors", printable(name, 120));
    }
    map.emplace_back(tensor, name);
  }
  std::sort(map.begin(), map.end());
  return map;
}

}  // namespace tessera::checkpoint
