// SPDX-License-Identifier: Apache-2.0
#pragma once
// Seams through which tests fail the n-th allocation and the n-th file call. Compiled in only with TESSERA_TEST_SEAMS
// (presets cpu, asan, tsan); in a release build both questions are constants and cost nothing.
#include <cstdint>

#include "base/test_seams_config.h"  // of the build folder: defines TESSERA_TEST_SEAMS, or does not

namespace tessera::seams {

#ifdef TESSERA_TEST_SEAMS
// Arms a seam: the n-th call from now (1 = the next) fails, and as many after it as make `count`; 0 disarms. Not
// thread-safe against running work.
void fail_allocation(int64_t nth, int64_t count = 1);
void fail_file_call(int64_t nth);
// The calling thread's calls, not counted and never failed: a client beside the server that is tested, say.
void spare_this_thread(bool is_spared);
// Calls counted since the seam was armed last.
int64_t num_allocations();
int64_t num_file_calls();
// Asked by base/file and device/buffer, and by the tests' operator new: does this call fail?
bool is_failing_allocation();
bool is_failing_file_call();
#else
constexpr bool is_failing_allocation() {
  return false;
}
constexpr bool is_failing_file_call() {
  return false;
}
#endif

}  // namespace tessera::seams
