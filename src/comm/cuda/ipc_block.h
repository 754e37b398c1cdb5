// SPDX-License-Identifier: Apache-2.0
#pragma once
// A block of a GPU's memory that the GPUs of other ranks reach, threads of this process or processes of this machine.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm/message.h"
#include "device/cuda/memory.h"

namespace tessera::comm {

class IpcBlock {
 public:
  // On the calling thread's GPU, every byte `fill`. Throws as device::cuda::Memory; kDeviceError where it can't be
  // reached from elsewhere.
  IpcBlock(size_t bytes, uint8_t fill);
  ~IpcBlock() { let_go(); }
  IpcBlock(const IpcBlock&) = delete;
  IpcBlock& operator=(const IpcBlock&) = delete;

  void* data() const { return memory_.data(); }
  // What another rank needs to reach it, in a form of fixed size.
  std::vector<uint8_t> address() const;
  // Where that of another rank lies on this GPU, for as long as this; null, and why not.
  void* reach(std::span<const uint8_t> address, std::string& why_not);
  // Of all others', behind what the GPU has to do.
  void let_go() noexcept;

 private:
  static constexpr size_t kMaxIdBytes = 64;
  struct Address {
    char machine[kMaxIdBytes] = {};  // of its current run
    Nonce process{};                 // containers of one machine have equal process numbers
    int64_t ordinal = 0;
    void* data = nullptr;  // in that process
    cudaIpcMemHandle_t handle{};
  };

  device::cuda::Memory memory_;
  Address own_;
  std::vector<void*> mapped_;
};

}  // namespace tessera::comm
