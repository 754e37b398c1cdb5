// SPDX-License-Identifier: Apache-2.0
#include "text/grammar/spelled_marker.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/rng.h"
#include "testing/goldens.h"
#include "text/chat/markers.h"

namespace tessera::text {
namespace {

const Tokenizer& tiny() {
  static const Tokenizer tokenizer = Tokenizer::load(testing::tiny_model() + "/tokenizer.json");
  return tokenizer;
}

size_t longest_beginning(std::string_view marker, std::string_view text) {
  for (size_t size = marker.size() - 1; size > 0; --size) {
    if (text.ends_with(marker.substr(0, size))) return size;
  }
  return 0;
}

// Random tokens, half of them such that the marker goes on: what is said to complete it does, and nothing else.
TEST(SpelledMarker, SaysWhichTokensWouldCompleteIt) {
  for (const std::string_view text : {kEndThinkToken, kDsmlToken, std::string_view("abab"), std::string_view("aa")}) {
    const SpelledMarker marker(tiny(), text);
    const auto own = tiny().added_token(text);
    Rng rng(1);
    std::string said;
    size_t matched = 0, num_completing = 0;
    for (int i = 0; i < 60; ++i) {
      ASSERT_EQ(matched, longest_beginning(text, said)) << said;
      const std::span<const int32_t> completing = marker.completing(matched);
      std::vector<int32_t> ongoing;
      for (int32_t id = 0; id < tiny().vocab_size(); ++id) {
        const std::string& bytes = tiny().token_bytes(id);
        const bool completes =
            id != own && (said.substr(said.size() - matched) + bytes).find(text) != std::string::npos;
        ASSERT_EQ(std::binary_search(completing.begin(), completing.end(), id), completes) << said << "|" << bytes;
        num_completing += completes ? 1 : 0;
        if (!completes && id != own && text.substr(matched).starts_with(bytes) && !bytes.empty()) ongoing.push_back(id);
      }
      int32_t id = ongoing.empty() || rng.below(4) == 0
                       ? static_cast<int32_t>(rng.below(static_cast<uint64_t>(tiny().vocab_size())))
                       : ongoing[rng.below(ongoing.size())];
      while (id == own || std::binary_search(completing.begin(), completing.end(), id)) id = (id + 1) % 100;
      said += tiny().token_bytes(id);
      matched = marker.advance(matched, tiny().token_bytes(id));
    }
    EXPECT_GT(num_completing, 0u) << text;
    EXPECT_EQ(marker.advance(0, text), 0u) << "complete";
  }
}

}  // namespace
}  // namespace tessera::text
