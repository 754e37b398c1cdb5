// SPDX-License-Identifier: Apache-2.0
// Every fuzz target on its kept inputs (corpora/NAME: what long libFuzzer runs found to reach different code, and sound
// inputs) and on thousands of random mutations of them. Long runs use the libFuzzer programs (preset fuzz).
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "fuzz/targets.h"
#include "testing/sanitized.h"
#include "testing/seed.h"

namespace tessera::fuzz {
namespace {

std::string mutate(std::string text, std::mt19937& random) {
  static const char* const kPieces[] = {
      "{",     "}",    "[",    "]",       "\"",   ":", ",",  "0", "-1", "9223372036854775807",
      "1e308", "null", "true", "\\u0000", "\xff", "a", "\\", " "};
  for (uint32_t edits = 1 + random() % 4; edits > 0; --edits) {
    const size_t at = text.empty() ? 0 : random() % text.size();
    switch (random() % 5) {
      case 0:
        if (!text.empty()) text[at] = static_cast<char>(random());
        break;
      case 1:
        text.insert(at, kPieces[random() % (sizeof(kPieces) / sizeof(kPieces[0]))]);
        break;
      case 2:
        text.erase(at, 1 + random() % 8);
        break;
      case 3:
        text.insert(at, text.substr(random() % (text.size() + 1), random() % 40));
        break;
      case 4:
        text.resize(random() % (text.size() + 1));
        break;
    }
  }
  return text;
}

std::vector<std::string> kept_inputs(const std::string& target) {
  std::vector<std::string> inputs;
  for (const auto& file : std::filesystem::directory_iterator(std::string(TESSERA_FUZZ_CORPORA) + "/" + target)) {
    std::ostringstream text;
    text << std::ifstream(file.path(), std::ios::binary).rdbuf();
    inputs.push_back(text.str());
  }
  return inputs;
}

class Mutations : public ::testing::TestWithParam<size_t> {};

TEST_P(Mutations, NeverCrash) {
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const Target& target = kTargets[GetParam()];
  const auto run = [&](const std::string& text) {
    target.run(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  };
  const std::vector<std::string> inputs = kept_inputs(target.name);
  ASSERT_FALSE(inputs.empty()) << target.name;
  for (const std::string& input : inputs) run(input);
  run("");
  constexpr int kRounds = testing::kIsSanitized ? 10000 : 20000;
  for (int i = 0; i < kRounds; ++i) run(mutate(inputs[random() % inputs.size()], random));
}

INSTANTIATE_TEST_SUITE_P(Targets, Mutations, ::testing::Range(size_t{0}, kNumTargets),
                         [](const auto& target) { return std::string(kTargets[target.param].name); });

}  // namespace
}  // namespace tessera::fuzz
