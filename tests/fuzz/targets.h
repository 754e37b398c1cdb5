// SPDX-License-Identifier: Apache-2.0
#pragma once
// What is fuzzed: each target takes any bytes and must return, or throw Error with a code that blames the input.
#include <cstddef>
#include <cstdint>

namespace tessera::fuzz {

struct Target {
  const char* name;  // its inputs are kept in corpora/NAME/
  void (*run)(const uint8_t* data, size_t size);
};

extern const Target kTargets[];
extern const size_t kNumTargets;

}  // namespace tessera::fuzz
