// SPDX-License-Identifier: Apache-2.0
#pragma once
// Owned, aligned memory. Fresh bytes are zero unless said otherwise.
#include <cstddef>
#include <cstdint>

#include "device/memory_space.h"
#include "tensor/tensor_view.h"

namespace tessera::device {

class Buffer {
 public:
  Buffer() = default;
  // Throws as MemorySpace::allocate. The tail up to the next multiple of kBufferAlignment is allocated and zero too.
  // `memory` must outlive the buffer.
  explicit Buffer(size_t bytes, MemorySpace& memory = host_memory());
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  Buffer clone() const;
  // The bytes of a buffer of the host in another memory.
  Buffer clone_into(MemorySpace& memory) const;
  size_t size() const { return bytes_; }
  MemorySpace& memory() const { return *memory_; }
  void* data() const { return data_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  MemorySpace* memory_ = &host_memory();
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// A tensor that owns its memory.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, const Shape& shape, MemorySpace& memory = host_memory());
  // A tensor of the host in another memory.
  Tensor clone_into(MemorySpace& memory) const;
  const TensorView& view() const { return view_; }
  operator const TensorView&() const { return view_; }
  template <class T>
  T* as() const {
    return view_.as<T>();
  }

 private:
  Buffer buffer_;
  TensorView view_;
};

// Bump allocator over one buffer: what a step uses is laid out when the model is built, so a step allocates nothing.
class Arena {
 public:
  Arena() = default;
  explicit Arena(size_t bytes, MemorySpace& memory = host_memory()) : buffer_(bytes, memory) {}
  // Aligned to kBufferAlignment; throws kInternal where the arena is full (the plan was wrong).
  TensorView take(DType dtype, const Shape& shape);
  size_t used_bytes() const { return used_; }
  MemorySpace& memory() const { return buffer_.memory(); }
  // Everything taken after a mark is given back by reset_to(mark).
  size_t mark() const { return used_; }
  void reset_to(size_t mark) { used_ = mark; }

 private:
  Buffer buffer_;
  size_t used_ = 0;
};

// Bytes that Arena::take uses for such a tensor.
size_t arena_bytes(DType dtype, const Shape& shape);

}  // namespace tessera::device
