// SPDX-License-Identifier: Apache-2.0
#include "text/grammar/trial.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <vector>

#include "base/error.h"

namespace tessera::text {
namespace {

// Does what the definition's text says.
class Obedient final : public TrialWork {
 public:
  void run(const GrammarDefinition& definition) const override {
    if (definition.text == "loop") {
      volatile bool goes_on = true;
      while (goes_on) {
      }
    }
    if (definition.text == "eat") throw std::bad_alloc();
    if (definition.text == "grow") {
      std::vector<std::vector<char>> blocks;
      for (int i = 0; i < 64; ++i) blocks.emplace_back().reserve(size_t{8} << 20);
    }
    if (definition.text == "crash") std::abort();
    if (definition.text == "killed") raise(SIGKILL);
    if (definition.text == "throw") throw std::runtime_error("no");
    const bool is_whole = definition.tools.size() == 2 && definition.tools[1].parameters == std::string(70000, 'p') &&
                          !definition.allows_parallel && definition.is_in_block;
    if (definition.text == "whole" && !is_whole) std::abort();
  }
};

std::string fault_of(Trial& trial, const std::string& text) {
  GrammarDefinition definition;
  definition.text = text;
  try {
    trial.run(definition);
  } catch (const Error& error) {
    const bool is_busy = std::string(error.what()).find("ask again") != std::string::npos;
    EXPECT_EQ(error.code(), is_busy ? ErrorCode::kResourceExhausted : ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "";
}

TEST(GrammarTrial, LimitsAreMetInAnotherProcess) {
  const Obedient work;
  Trial trial(work, {.seconds = 1});
  EXPECT_EQ(fault_of(trial, "fine"), "");
  // A machine that gives it too little of its processors lets the clock end it.
  EXPECT_THAT(fault_of(trial, "loop"),
              ::testing::AnyOf(::testing::HasSubstr("within 1 s"), ::testing::HasSubstr("ask again")));
  EXPECT_THAT(fault_of(trial, "eat"), ::testing::HasSubstr("256 MiB"));
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_THAT(fault_of(trial, "grow"), ::testing::HasSubstr("256 MiB"));
#endif
  EXPECT_THAT(fault_of(trial, "crash"), ::testing::HasSubstr("can be compiled"));
  // As the system does that lacks memory: it is not the definition's fault.
  EXPECT_THAT(fault_of(trial, "killed"), ::testing::HasSubstr("ask again"));
  EXPECT_EQ(fault_of(trial, "throw"), "");
  EXPECT_EQ(fault_of(trial, "fine"), "");
}

TEST(GrammarTrial, DefinitionsArriveWhole) {
  const Obedient work;
  Trial trial(work, {});
  GrammarDefinition definition;
  definition.text = "whole";
  definition.tools = {{"a", ""}, {"b", std::string(70000, 'p')}};
  definition.allows_parallel = false, definition.is_in_block = true;
  EXPECT_NO_THROW(trial.run(definition));
}

}  // namespace
}  // namespace tessera::text
