// SPDX-License-Identifier: Apache-2.0
#pragma once
// A corpus of checkpoint folders with something wrong in them: each rule broken alone, and pairs of them.
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace tessera::testing {

// A folder's files by name, in memory.
using Files = std::map<std::string, std::string>;

// A small sound model: config.json, tokenizer.json (bytes and one merge) and model.safetensors of some hundred KiB.
Files sound_model();

struct Damage {
  std::string what;  // "config.json: hidden_size -> -1"
  std::string file;  // what the message must name: a file, or a tensor
  // False where there is nothing to damage, for another damage took it away.
  std::function<bool(Files&)> apply;
};

// All of them alone are refused.
std::vector<Damage> hostile_damages();

void write_files(const Files& files, const std::string& folder);

}  // namespace tessera::testing
