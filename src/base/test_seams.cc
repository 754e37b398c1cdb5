// SPDX-License-Identifier: Apache-2.0
#include "base/test_seams.h"

#ifdef TESSERA_TEST_SEAMS
#include <atomic>

namespace tessera::seams {

namespace {

struct Seam {
  std::atomic<int64_t> count{0};
  std::atomic<int64_t> failing{0};  // 0: disarmed
  void arm(int64_t nth) {
    count = 0;
    failing = nth;
  }
  bool is_failing() { return ++count == failing; }
};

constinit thread_local bool t_is_spared = false;
constinit Seam g_allocations;
constinit Seam g_file_calls;

}  // namespace

void fail_allocation(int64_t nth) {
  g_allocations.arm(nth);
}
void fail_file_call(int64_t nth) {
  g_file_calls.arm(nth);
}
void spare_this_thread(bool is_spared) {
  t_is_spared = is_spared;
}
int64_t num_allocations() {
  return g_allocations.count;
}
int64_t num_file_calls() {
  return g_file_calls.count;
}
bool is_failing_allocation() {
  return !t_is_spared && g_allocations.is_failing();
}
bool is_failing_file_call() {
  return !t_is_spared && g_file_calls.is_failing();
}

}  // namespace tessera::seams
#endif
