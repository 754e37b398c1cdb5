// SPDX-License-Identifier: Apache-2.0
#include "base/test_seams.h"

#ifdef TESSERA_TEST_SEAMS
#include <atomic>

namespace tessera::seams {

namespace {

struct Seam {
  std::atomic<int64_t> count{0};
  std::atomic<int64_t> first{0}, end{0};  // of those that fail; both 0: disarmed
  void arm(int64_t nth, int64_t num_failing) {
    first = end = 0;
    count = 0;
    if (nth > 0) first = nth, end = nth + num_failing;
  }
  bool is_failing() {
    const int64_t nth = ++count;
    return nth < end && nth >= first;
  }
};

constinit thread_local bool t_is_spared = false;
constinit Seam g_allocations;
constinit Seam g_file_calls;

}  // namespace

void fail_allocation(int64_t nth, int64_t count) {
  g_allocations.arm(nth, count);
}
void fail_file_call(int64_t nth) {
  g_file_calls.arm(nth, 1);
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
