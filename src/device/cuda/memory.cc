// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/memory.h"

#include <utility>

#include "device/cuda/check.h"

namespace tessera::device::cuda {

Memory::Memory(Kind kind, size_t bytes) : kind_(kind), bytes_(bytes) {
  if (bytes == 0) return;
  if (kind == Kind::kDevice) {
    TESSERA_CUDA_CHECK(cudaMalloc(&data_, bytes));
  } else {
    TESSERA_CUDA_CHECK(cudaMallocHost(&data_, bytes));
  }
}

Memory::Memory(Memory&& other) noexcept
    : kind_(other.kind_), data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(kind_, other.kind_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Memory::~Memory() {
  if (data_ == nullptr) return;
  kind_ == Kind::kDevice ? cudaFree(data_) : cudaFreeHost(data_);
}

void copy(const StreamQueue& queue, void* target, const void* source, size_t bytes) {
  if (bytes == 0) return;
  TESSERA_CUDA_CHECK(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, queue.handle()));
}

void fill(const StreamQueue& queue, void* target, unsigned char value, size_t bytes) {
  if (bytes == 0) return;
  TESSERA_CUDA_CHECK(cudaMemsetAsync(target, value, bytes, queue.handle()));
}

}  // namespace tessera::device::cuda
