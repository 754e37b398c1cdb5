// SPDX-License-Identifier: Apache-2.0
#include "device/memory_space.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <unordered_set>

#include "base/test_seams.h"
#include "device/page_mapping.h"

namespace tessera::device {

namespace {

// From this size on, blocks are mappings of their own: as many as are sure not to exhaust what Linux gives a process
// (65,530 unless told otherwise), should the system not join neighbours.
constexpr size_t kLargeBlock = size_t{2} << 20;
constexpr size_t kMostMapped = 32768;

class HostMemory final : public MemorySpace {
 public:
  void* allocate(size_t bytes) override {
    if (seams::is_failing_allocation()) throw std::bad_alloc();
    if (bytes >= kLargeBlock) {
      if (void* data = map(bytes)) return data;
    }
    void* data = nullptr;
    if (posix_memalign(&data, kBufferAlignment, bytes) != 0) throw std::bad_alloc();
    std::memset(data, 0, bytes);
    return data;
  }
  void release(void* data, size_t bytes) noexcept override {
    if (bytes < kLargeBlock || !unmap(data, bytes)) std::free(data);
  }
  void upload(void* target, const void* host, size_t bytes) override { copy(target, host, bytes); }
  void download(void* host, const void* source, size_t bytes) override { copy(host, source, bytes); }
  void queue_download(void* host, const void* source, size_t bytes) override { copy(host, source, bytes); }
  void copy(void* target, const void* source, size_t bytes) override {
    if (bytes > 0) std::memcpy(target, source, bytes);
  }
  bool is_host() const override { return true; }

 private:
  void* map(size_t bytes) {
    const std::lock_guard<std::mutex> hold(lock_);
    if (mapped_.size() >= kMostMapped) return nullptr;
    void* data = map_zero_pages(bytes);
    if (data == nullptr) return nullptr;
    try {
      mapped_.insert(data);
    } catch (...) {
      unmap_pages(data, bytes);
      throw;
    }
    return data;
  }
  bool unmap(void* data, size_t bytes) noexcept {
    const std::lock_guard<std::mutex> hold(lock_);
    if (mapped_.erase(data) == 0) return false;
    unmap_pages(data, bytes);
    return true;
  }

  std::mutex lock_;
  std::unordered_set<void*> mapped_;
};

}  // namespace

MemorySpace& host_memory() {
  static HostMemory memory;
  return memory;
}

}  // namespace tessera::device
