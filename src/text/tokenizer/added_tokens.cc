// SPDX-License-Identifier: Apache-2.0
#include "text/tokenizer/added_tokens.h"

namespace tessera::text {

void AddedTokens::add(std::string_view content, int32_t id) {
  begins_[static_cast<unsigned char>(content.front())] = true;
  size_t node = 0;
  for (const char c : content) {
    const auto [child, is_new] =
        nodes_[node].children.try_emplace(static_cast<unsigned char>(c), static_cast<int32_t>(nodes_.size()));
    const size_t next = static_cast<size_t>(child->second);
    if (is_new) nodes_.emplace_back();
    node = next;
  }
  nodes_[node].id = id;
}

AddedTokens::Found AddedTokens::find(std::string_view text, size_t from) const {
  for (size_t begin = from; begin < text.size(); ++begin) {
    if (!begins_[static_cast<unsigned char>(text[begin])]) continue;
    Found longest;
    size_t node = 0;
    for (size_t i = begin; i < text.size(); ++i) {
      const auto child = nodes_[node].children.find(static_cast<unsigned char>(text[i]));
      if (child == nodes_[node].children.end()) break;
      node = static_cast<size_t>(child->second);
      if (nodes_[node].id >= 0) longest = {begin, i + 1 - begin, nodes_[node].id};
    }
    if (longest.id >= 0) return longest;
  }
  return {};
}

}  // namespace tessera::text
