// SPDX-License-Identifier: Apache-2.0
#pragma once
// Page-locked memory through which weights pass on their way to a GPU. Blocks are used again and again, each when the
// copies that were queued before its release are made: reading goes on meanwhile, and nobody waits but for the slower
// of disk and bus.
#include <mutex>
#include <vector>

#include "device/cuda/stream_queue.h"
#include "device/memory_space.h"

namespace tessera::device::cuda {

class LoadingMemory final : public MemorySpace {
 public:
  // The queue must outlive it.
  explicit LoadingMemory(const StreamQueue& queue) : queue_(queue) {}
  ~LoadingMemory() { clear(); }
  // Gives back what nobody uses, once copies from it are made.
  void clear() noexcept;

  // Blocks up to kMaxBlock; larger ones are ordinary memory. Bytes are what they were.
  void* allocate(size_t bytes) override;
  void release(void* data, size_t bytes) noexcept override;

  void upload(void* target, const void* host, size_t bytes) override { host_memory().upload(target, host, bytes); }
  void download(void* host, const void* source, size_t bytes) override { host_memory().download(host, source, bytes); }
  void queue_download(void* host, const void* source, size_t bytes) override { download(host, source, bytes); }
  void copy(void* target, const void* source, size_t bytes) override { host_memory().copy(target, source, bytes); }
  bool is_host() const override { return true; }

 private:
  struct Block {
    void* data = nullptr;
    size_t bytes = 0;
    bool is_used = false;
    Event free;  // reached when copies from it are made
  };
  // A block of that size from which copies are made; null where there is none.
  Block* reuse(size_t bytes, bool may_wait);

  const StreamQueue& queue_;
  std::mutex mutex_;
  std::vector<Block*> blocks_;  // oldest release first
  size_t total_ = 0;
};

}  // namespace tessera::device::cuda
