// SPDX-License-Identifier: Apache-2.0
#pragma once
// What tests with random data begin with.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>

namespace tessera {

// Another number in each run; where TESSERA_TEST_SEED is set, one made of its text, the running test's name and how
// often that test has asked, whichever tests run beside it: who runs a commit with its text runs what others ran.
inline uint32_t fresh_seed() {
  const char* text = std::getenv("TESSERA_TEST_SEED");
  if (text == nullptr || *text == '\0') return std::random_device{}();
  static const ::testing::TestInfo* last = nullptr;
  static int num_asked = 0;
  const ::testing::TestInfo* test = ::testing::UnitTest::GetInstance()->current_test_info();
  num_asked = test == last ? num_asked + 1 : 1;
  last = test;
  std::string name = text;
  if (test != nullptr) name += std::string("/") + test->test_suite_name() + "." + test->name();
  name += "/" + std::to_string(num_asked);
  uint32_t seed = 2166136261;  // FNV-1a
  for (const char c : name) seed = (seed ^ static_cast<uint8_t>(c)) * 16777619;
  return seed;
}

}  // namespace tessera
