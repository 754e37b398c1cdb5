// SPDX-License-Identifier: Apache-2.0
#pragma once
// Addresses in the window of shared memory, as descriptors hold them, on the emulated GPU: dynamic shared memory begins
// behind what the hardware keeps for itself, on a boundary that suits every swizzle.
#include <cstdint>

#include "device/cuda/emulated/block.h"

namespace tessera::backends::cuda_common::ptx::emulated {

constexpr uint32_t kSharedWindow = 1024;  // address of the first byte of dynamic shared memory

// Bytes from the begin of dynamic shared memory to `shared`; -1: it is not there.
inline int64_t shared_offset(const void* shared) {
  const auto begin = reinterpret_cast<uintptr_t>(device::emulated::dynamic_shared());
  const auto at = reinterpret_cast<uintptr_t>(shared);
  return begin == 0 || at < begin || at - begin >= device::emulated::dynamic_shared_bytes()
             ? -1
             : static_cast<int64_t>(at - begin);
}

inline uint32_t shared_address(const void* shared) {
  const int64_t offset = shared_offset(shared);
  if (offset < 0) device::emulated::fail("the address of what is not in dynamic shared memory goes to a descriptor");
  return kSharedWindow + static_cast<uint32_t>(offset);
}

// The `bytes` bytes at an address; null: they are not all in dynamic shared memory.
inline const unsigned char* shared_at(uint32_t address, uint32_t bytes) {
  if (address < kSharedWindow || address - kSharedWindow + bytes > device::emulated::dynamic_shared_bytes()) {
    return nullptr;
  }
  return static_cast<const unsigned char*>(device::emulated::dynamic_shared()) + (address - kSharedWindow);
}

}  // namespace tessera::backends::cuda_common::ptx::emulated
