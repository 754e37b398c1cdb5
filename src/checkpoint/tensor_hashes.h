// SPDX-License-Identifier: Apache-2.0
#pragma once
// hashes.json: one XXH3-128 hash per tensor, so that a damaged download or copy is found and the tensor named.
//   {"algorithm": "xxh3-128", "tensors": {"layers.0.attn.wq_a.weight": "0123456789abcdef0123456789abcdef", ...}}
// A hash is that of the tensor's raw bytes as they lie in its shard (seed 0, canonical big-endian form as `xxhsum -H2`
// prints it), so it depends neither on the sharding nor on the order of the tensors. It guards against accidents, not
// against an attacker. Source of the function: xxHash, doc/xxhash_spec.md.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/log.h"
#include "checkpoint/checkpoint.h"

namespace tessera::checkpoint {

inline constexpr const char* kHashesName = "hashes.json";

// Hashes bytes that come in parts.
class TensorHasher {
 public:
  TensorHasher();
  ~TensorHasher();
  TensorHasher(TensorHasher&& other) noexcept;
  TensorHasher& operator=(TensorHasher&& other) noexcept;

  void update(const void* data, size_t bytes);
  // 32 lower-case hex digits of all bytes so far.
  std::string hex() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// (tensor name, 32 hex digits), sorted by name.
using TensorHashes = std::vector<std::pair<std::string, std::string>>;

// Reads one tensor in parts of a few MiB and returns its hash; `progress` (may be null) advances by the bytes read.
// Throws kDataLoss where the file has shrunk.
std::string hash_tensor(const LocatedTensor& tensor, ProgressSink* progress);

// The text of hashes.json: names sorted, one tensor per line. `hashes` in any order.
std::string format_hashes(TensorHashes hashes);

// The inverse of format_hashes, for any JSON of that shape. `where` names the file. Throws kDataLoss for another
// algorithm, or a hash that is not 32 hex digits; upper case is accepted and lowered.
TensorHashes parse_hashes(std::string_view text, const std::string& where);

// DIRECTORY/hashes.json; empty where there is none. Throws as parse_hashes.
TensorHashes load_hashes(const std::string& directory);

// Writes DIRECTORY/hashes.json whole or not at all. Throws kInvalidArgument where the folder can't be written.
void write_hashes(const std::string& directory, const TensorHashes& hashes);

}  // namespace tessera::checkpoint
