// SPDX-License-Identifier: Apache-2.0
#pragma once
// A kind of memory: the host's, or a GPU's. Owned bytes (device/buffer.h) say in which they lie.
#include <cstddef>

namespace tessera::device {

// Wide enough for any vector load and for a cache line pair.
constexpr size_t kBufferAlignment = 128;

class MemorySpace {
 public:
  virtual ~MemorySpace() = default;

  // `bytes` > 0, a multiple of kBufferAlignment; aligned to that, and zero. Of the host, pages of a large block come
  // into being when they are written first, by whatever thread, where the memory policy of the caller wants them.
  // Throws std::bad_alloc where the host's memory ends, kResourceExhausted where a GPU's does.
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* data, size_t bytes) noexcept = 0;
  // So many bytes are the program's from now on: what is allocated later, up to as much at once, takes nothing more
  // from the device. The host's memory is not reserved. Throws as allocate, and has reserved nothing then.
  virtual void reserve(size_t /*bytes*/) {}

  // Copies in the order of the queue's work. Host memory may be used again on return.
  virtual void upload(void* target, const void* host, size_t bytes) = 0;
  virtual void download(void* host, const void* source, size_t bytes) = 0;
  // The same, but the bytes are there only after Executor::synchronize(). `host` is staging memory.
  virtual void queue_download(void* host, const void* source, size_t bytes) = 0;
  virtual void copy(void* target, const void* source, size_t bytes) = 0;  // both lie here

  // True: the host's functions may read and write it.
  virtual bool is_host() const = 0;
};

MemorySpace& host_memory();

}  // namespace tessera::device
