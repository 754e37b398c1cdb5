// SPDX-License-Identifier: Apache-2.0
#include "program_identity.h"

#include <fmt/format.h>
#include <gnu/libc-version.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <vector>

#include "base/file.h"

namespace tessera::app {

std::string program_identity() {
  const File file = File::open_read("/proc/self/exe");
  const uint64_t size = file.size();
  std::vector<char> piece(size_t{1} << 20);
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  for (uint64_t at = 0; at < size; at += piece.size()) {
    const size_t bytes = static_cast<size_t>(std::min<uint64_t>(piece.size(), size - at));
    file.read_at(at, piece.data(), bytes);
    XXH3_128bits_update(&state, piece.data(), bytes);
  }
  const XXH128_hash_t hash = XXH3_128bits_digest(&state);
  return fmt::format("{:016x}{:016x}|glibc {}", hash.high64, hash.low64, gnu_get_libc_version());
}

}  // namespace tessera::app
