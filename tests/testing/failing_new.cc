// SPDX-License-Identifier: Apache-2.0
// operator new that asks the allocation seam, so that tests can fail the n-th allocation of anything.
#include "testing/failing_new.h"

#include <cstdlib>
#include <new>

#include "base/test_seams.h"

#if defined(TESSERA_TEST_SEAMS) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#if defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define TESSERA_KEEP_NEW
#endif
#endif
#ifndef TESSERA_KEEP_NEW
#define TESSERA_NEW_FAILS
void* operator new(std::size_t bytes) {
  void* memory = tessera::seams::is_failing_allocation() ? nullptr : std::malloc(bytes > 0 ? bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
#endif
#endif

namespace tessera::seams {

bool can_new_fail() {
#ifdef TESSERA_NEW_FAILS
  return true;
#else
  return false;
#endif
}

}  // namespace tessera::seams
