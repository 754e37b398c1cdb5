// SPDX-License-Identifier: Apache-2.0
#pragma once
// model.safetensors.index.json: which shard holds which tensor.
#include <string>
#include <utility>
#include <vector>

namespace tessera::checkpoint {

// Pairs (tensor name, file name), by tensor name. `metadata.total_size` is not looked at: exporters copy stale values.
// Throws kDataLoss where a file name is not a plain one inside the folder. `text` is the JSON, `where` names the file.
std::vector<std::pair<std::string, std::string>> parse_shard_index(const std::string& text, const std::string& where);

}  // namespace tessera::checkpoint
