// SPDX-License-Identifier: Apache-2.0
#include "device/page_mapping.h"

#if defined(__linux__)

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

namespace tessera::device {

namespace {

constexpr unsigned long kMaxNodes = 1024;  // the most that Linux can be built for

// Gives a mapping the calling thread's policy: otherwise each page would follow the thread that writes it first. False
// where there is one and it can't be given (each policy may split a mapping in two, and their number is limited).
bool take_policy_of_caller(void* data, size_t bytes) {
  int mode = MPOL_DEFAULT;
  unsigned long nodes[kMaxNodes / (8 * sizeof(unsigned long))] = {};
  // The system counts one node less than it is told. A system that doesn't let us ask doesn't let us set one either.
  if (syscall(SYS_get_mempolicy, &mode, nodes, kMaxNodes + 1, nullptr, 0) != 0) return true;
  if (mode == MPOL_DEFAULT) return true;
  return syscall(SYS_mbind, data, bytes, mode, nodes, kMaxNodes + 1, 0) == 0;
}

}  // namespace

void* map_zero_pages(size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  // A fault and a translation per 2 MiB instead of 4 KiB, for weights that every token reads. Neighbouring mappings are
  // one to the system, so large pages may reach over their ends. A system that won't is no error.
  madvise(data, bytes, MADV_HUGEPAGE);
  if (!take_policy_of_caller(data, bytes)) std::memset(data, 0, bytes);
  return data;
}

void unmap_pages(void* data, size_t bytes) noexcept {
  munmap(data, bytes);
}

}  // namespace tessera::device

#else

namespace tessera::device {

void* map_zero_pages(size_t) {
  return nullptr;
}

void unmap_pages(void*, size_t) noexcept {}

}  // namespace tessera::device

#endif
