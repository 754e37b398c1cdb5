// SPDX-License-Identifier: Apache-2.0
#include "device/memory_space.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdlib>
#include <cstring>
#include <new>

#include "base/test_seams.h"

namespace tessera::device {

namespace {

constexpr size_t kLargePage = size_t{2} << 20;

// A fault and a translation per 2 MiB instead of 4 KiB, for weights that every token reads. What doesn't fill a large
// page stays on small ones, so nothing is wasted; a system that won't is no error.
void prefer_large_pages(void* data, size_t bytes) {
#if defined(__linux__)
  if (bytes >= kLargePage) madvise(data, bytes / kLargePage * kLargePage, MADV_HUGEPAGE);
#endif
}

class HostMemory final : public MemorySpace {
 public:
  void* allocate(size_t bytes) override {
    if (seams::is_failing_allocation()) throw std::bad_alloc();
    void* data = nullptr;
    if (posix_memalign(&data, bytes >= kLargePage ? kLargePage : kBufferAlignment, bytes) != 0) throw std::bad_alloc();
    prefer_large_pages(data, bytes);
    std::memset(data, 0, bytes);
    return data;
  }
  void release(void* data, size_t) noexcept override { std::free(data); }
  void upload(void* target, const void* host, size_t bytes) override { copy(target, host, bytes); }
  void download(void* host, const void* source, size_t bytes) override { copy(host, source, bytes); }
  void queue_download(void* host, const void* source, size_t bytes) override { copy(host, source, bytes); }
  void copy(void* target, const void* source, size_t bytes) override {
    if (bytes > 0) std::memcpy(target, source, bytes);
  }
  bool is_host() const override { return true; }
};

}  // namespace

MemorySpace& host_memory() {
  static HostMemory memory;
  return memory;
}

}  // namespace tessera::device
