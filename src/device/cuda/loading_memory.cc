// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/loading_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <new>

#include "device/cuda/check.h"

namespace tessera::device::cuda {

namespace {

// Of a size class of powers of two; all that is locked; the largest block.
constexpr size_t kMinBlock = 64 << 10, kBudget = 512 << 20, kMaxBlock = 64 << 20;

}  // namespace

void LoadingMemory::clear() noexcept {
  const std::lock_guard lock(mutex_);
  std::erase_if(blocks_, [&](Block* block) {
    if (block->is_used) return false;
    try {
      block->free.wait();  // the GPU may still be copying from it
    } catch (...) {
      return false;  // then so be it: it stays locked
    }
    cudaFreeHost(block->data);
    total_ -= block->bytes;
    delete block;
    return true;
  });
}

LoadingMemory::Block* LoadingMemory::reuse(size_t bytes, bool may_wait) {
  const auto found = std::find_if(blocks_.begin(), blocks_.end(),
                                  [&](const Block* block) { return !block->is_used && block->bytes == bytes; });
  if (found == blocks_.end()) return nullptr;
  if (may_wait) (*found)->free.wait();
  return may_wait || (*found)->free.has_passed() ? *found : nullptr;
}

void* LoadingMemory::allocate(size_t bytes) {
  if (bytes > kMaxBlock) return host_memory().allocate(bytes);
  const size_t size = std::max(std::bit_ceil(bytes), kMinBlock);
  const std::lock_guard lock(mutex_);
  Block* block = reuse(size, total_ + size > kBudget);
  if (block == nullptr) {
    auto made = std::make_unique<Block>();
    made->bytes = size;
    if (cudaMallocHost(&made->data, size) != cudaSuccess) {
      cudaGetLastError();
      throw std::bad_alloc();
    }
    blocks_.push_back(made.get());
    total_ += size;
    block = made.release();
  }
  block->is_used = true;
  return block->data;
}

void LoadingMemory::release(void* data, size_t bytes) noexcept {
  if (bytes > kMaxBlock) return host_memory().release(data, bytes);
  const std::lock_guard lock(mutex_);
  const auto at = std::find_if(blocks_.begin(), blocks_.end(), [&](const Block* block) { return block->data == data; });
  Block* block = *at;
  try {
    block->free.record(queue_);
    block->is_used = false;  // else it is used by nobody again, which harms nobody
  } catch (...) {
  }
  std::rotate(at, at + 1, blocks_.end());  // now the latest
}

}  // namespace tessera::device::cuda
