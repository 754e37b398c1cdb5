// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tokens that are matched in the text itself before any splitting: special ones and the rest of added_tokens. At each
// place the longest wins, places from left to right.
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::text {

class AddedTokens {
 public:
  // Adds a token; `content` is not empty.
  void add(std::string_view content, int32_t id);

  struct Found {
    size_t begin = 0, length = 0;
    int32_t id = -1;  // -1: none
  };
  // The first match at or after `from`.
  Found find(std::string_view text, size_t from) const;

 private:
  struct Node {
    std::map<unsigned char, int32_t> children;
    int32_t id = -1;
  };
  std::vector<Node> nodes_{1};
  std::array<bool, 256> begins_{};  // by first byte: a token does
};

}  // namespace tessera::text
