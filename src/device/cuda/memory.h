// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory of a GPU, host memory that it can copy from and to while other work runs, and those copies.
#include <cstddef>

#include "device/cuda/stream_queue.h"

namespace tessera::device::cuda {

// Owns bytes. Fresh bytes hold anything.
class Memory {
 public:
  enum class Kind { kDevice, kPinnedHost };
  Memory() = default;
  // On the current GPU. Throws kResourceExhausted where they don't fit.
  Memory(Kind kind, size_t bytes);
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory();

  size_t size() const { return bytes_; }
  void* data() const { return data_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  Kind kind_ = Kind::kDevice;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Queues a copy between any two kinds of memory. With pageable host memory the call may wait.
void copy(const StreamQueue& queue, void* target, const void* source, size_t bytes);
// Queues filling with one byte.
void fill(const StreamQueue& queue, void* target, unsigned char value, size_t bytes);

}  // namespace tessera::device::cuda
