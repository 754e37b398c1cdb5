// SPDX-License-Identifier: Apache-2.0
#pragma once
// Keeps a marker of the chat format from being spelled in other tokens than its own: who reads the answer's text would
// take it for the marker, who watches its tokens would not.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer/tokenizer.h"

namespace tessera::text {

// Immutable, so threads may share it. How much of the marker a text ends with is its caller's: 0 of an empty text.
class SpelledMarker {
 public:
  // Looks at every byte of every token once for each byte of the marker.
  SpelledMarker(const Tokenizer& tokenizer, std::string_view marker);

  // Tokens that would complete the marker after a text that ends with `matched` bytes of it, its own token excepted.
  std::span<const int32_t> completing(size_t matched) const { return completing_[matched]; }
  // The longest beginning of the marker that the text ends with after `more`. One that is complete counts as none.
  size_t advance(size_t matched, std::string_view more) const;

 private:
  // As advance() for one byte, but a complete marker is its size.
  size_t next(size_t matched, char byte) const;

  const std::string marker_;
  std::vector<size_t> shorter_;  // [size + 1]: the longest proper beginning that the first n bytes end with
  std::vector<std::vector<int32_t>> completing_;  // [size]
};

}  // namespace tessera::text
