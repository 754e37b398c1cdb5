// SPDX-License-Identifier: Apache-2.0
#include "text/grammar/spelled_marker.h"

#include <algorithm>
#include <optional>

#include "base/error.h"

namespace tessera::text {

SpelledMarker::SpelledMarker(const Tokenizer& tokenizer, std::string_view marker)
    : marker_(marker), shorter_(marker.size() + 1, 0), completing_(marker.size()) {
  TESSERA_CHECK(!marker.empty(), "a marker is some bytes");
  for (size_t n = 2; n <= marker_.size(); ++n) shorter_[n] = next(shorter_[n - 1], marker_[n - 1]);
  const std::optional<int32_t> own = tokenizer.added_token(marker);
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    const std::string& bytes = tokenizer.token_bytes(id);
    if (id == own || bytes.find(marker_.back()) == std::string::npos) continue;
    for (size_t begin = 0; begin < marker_.size(); ++begin) {
      size_t matched = begin;
      const bool completes = std::any_of(bytes.begin(), bytes.end(),
                                         [&](char byte) { return (matched = next(matched, byte)) == marker_.size(); });
      if (completes) completing_[begin].push_back(id);
    }
  }
}

size_t SpelledMarker::next(size_t matched, char byte) const {
  while (matched > 0 && (matched == marker_.size() || marker_[matched] != byte)) matched = shorter_[matched];
  return marker_[matched] == byte ? matched + 1 : 0;
}

size_t SpelledMarker::advance(size_t matched, std::string_view more) const {
  for (const char byte : more) matched = next(matched, byte);
  return matched == marker_.size() ? 0 : matched;
}

}  // namespace tessera::text
