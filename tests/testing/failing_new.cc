// SPDX-License-Identifier: Apache-2.0
// operator new that asks the allocation seam, so that tests can fail the n-th allocation of anything.
#include "testing/failing_new.h"

#include <cstdlib>
#include <new>

#include "base/test_seams.h"

// Under AddressSanitizer malloc and free are still its own, so that it sees leaks and accesses beyond; only new that is
// given to free it does not see. All that may meet each other is replaced there: what comes from its new must not go to
// our delete. Aligned ones stay the library's.
#if defined(TESSERA_TEST_SEAMS) && !defined(__SANITIZE_THREAD__)
#if defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define TESSERA_KEEP_NEW
#endif
#endif
#ifndef TESSERA_KEEP_NEW
#define TESSERA_NEW_FAILS
namespace {

void* allocate(std::size_t bytes) noexcept {
  return tessera::seams::is_failing_allocation() ? nullptr : std::malloc(bytes > 0 ? bytes : 1);
}

void* allocate_or_throw(std::size_t bytes) {
  void* const memory = allocate(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) {
  return allocate_or_throw(bytes);
}
void* operator new[](std::size_t bytes) {
  return allocate_or_throw(bytes);
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return allocate(bytes);
}
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return allocate(bytes);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete[](void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, const std::nothrow_t&) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, const std::nothrow_t&) noexcept {
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
