// SPDX-License-Identifier: Apache-2.0
#pragma once
// A file of the disk tier: a state or a segment with all that says whose it is (docs/formats/prefix-cache.md). Nothing
// of a file is used before all of it was verified.
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/prefix_tier.h"

namespace tessera::engine {

struct TierFile {
  PrefixDigest identity{};    // of the model, the program and the machine that made it
  PrefixDigest digest{};      // of identity and of what it has seen
  bool is_segment = false;    // else a state
  std::vector<int32_t> tail;  // of a state: ids after the whole blocks
  SharedBytes first, second;  // a state's bytes and its tail's pages, or a segment's and nothing
};

// Bytes that the file takes.
int64_t tier_file_bytes(size_t tail_size, size_t first_bytes, size_t second_bytes);
// Appears whole or not at all, for its owner alone. Throws as AtomicFile.
void write_tier_file(const std::string& path, const TierFile& file);
// Throws kDataLoss, naming `path`, for anything that write_tier_file has not written.
TierFile parse_tier_file(std::span<const uint8_t> bytes, std::string_view path);
// Throws also as File::open_read, and kDataLoss where it is not `num_bytes` long.
TierFile read_tier_file(const std::string& path, int64_t num_bytes);

}  // namespace tessera::engine
