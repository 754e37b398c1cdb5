// SPDX-License-Identifier: Apache-2.0
// A libFuzzer program for the target number TESSERA_FUZZ_TARGET.
#include "fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  tessera::fuzz::kTargets[TESSERA_FUZZ_TARGET].run(data, size);
  return 0;
}
