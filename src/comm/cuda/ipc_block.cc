// SPDX-License-Identifier: Apache-2.0
#include "comm/cuda/ipc_block.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/file.h"
#include "comm/shared_part.h"
#include "device/cuda/check.h"

namespace tessera::comm {

namespace {

// The same for all ranks that are threads of this process, and for nobody else.
const Nonce& this_process() {
  static const Nonce number = random_nonce();
  return number;
}

std::string words(cudaError_t code) {
  cudaGetLastError();  // what was reported here shall not surface in a later call
  return fmt::format("{} ({})", cudaGetErrorName(code), cudaGetErrorString(code));
}

class GpuPart final : public SharedPart {
 public:
  explicit GpuPart(size_t bytes) : block_(bytes, 0) {}
  uint8_t* data() const override { return static_cast<uint8_t*>(block_.data()); }
  std::vector<uint8_t> address() const override { return block_.address(); }
  uint8_t* reach(std::span<const uint8_t> address, std::string& why_not) override {
    return static_cast<uint8_t*>(block_.reach(address, why_not));
  }
  void settle() noexcept override {}
  void let_go() noexcept override { block_.let_go(); }

 private:
  IpcBlock block_;
};

}  // namespace

IpcBlock::IpcBlock(size_t bytes, uint8_t fill) : memory_(device::cuda::Memory::Kind::kDevice, bytes) {
  static_assert(sizeof(Address) <= kSharedAddressBytes);
  TESSERA_CUDA_CHECK(cudaMemset(memory_.data(), fill, memory_.size()));
  TESSERA_CUDA_CHECK(cudaDeviceSynchronize());
  const std::string machine = read_file("/proc/sys/kernel/random/boot_id", kMaxIdBytes);
  std::memcpy(own_.machine, machine.data(), std::min(machine.size(), sizeof(own_.machine)));
  own_.process = this_process();
  int ordinal = 0;
  TESSERA_CUDA_CHECK(cudaGetDevice(&ordinal));
  own_.ordinal = ordinal;
  own_.data = memory_.data();
  TESSERA_CUDA_CHECK(cudaIpcGetMemHandle(&own_.handle, memory_.data()));
}

std::vector<uint8_t> IpcBlock::address() const {
  std::vector<uint8_t> bytes(sizeof(own_));
  std::memcpy(bytes.data(), &own_, bytes.size());
  return bytes;
}

void* IpcBlock::reach(std::span<const uint8_t> bytes, std::string& why_not) {
  Address address;
  if (bytes.size() != sizeof(address)) {
    why_not = "it says nothing of its memory";
    return nullptr;
  }
  std::memcpy(&address, bytes.data(), sizeof(address));
  if (std::memcmp(address.machine, own_.machine, sizeof(own_.machine)) != 0) {
    why_not = "it is on another machine";
    return nullptr;
  }
  // A handle opens in another process only.
  if (address.process == own_.process) {
    const cudaError_t code = cudaDeviceEnablePeerAccess(static_cast<int>(address.ordinal), 0);
    if (code != cudaSuccess && code != cudaErrorPeerAccessAlreadyEnabled) {
      why_not = words(code);
      return nullptr;
    }
    cudaGetLastError();
    return address.data;
  }
  void* mapped = nullptr;
  const cudaError_t code = cudaIpcOpenMemHandle(&mapped, address.handle, cudaIpcMemLazyEnablePeerAccess);
  if (code != cudaSuccess) {
    why_not = words(code);
    return nullptr;
  }
  mapped_.push_back(mapped);
  return mapped;
}

void IpcBlock::let_go() noexcept {
  cudaDeviceSynchronize();
  for (void* mapped : mapped_) cudaIpcCloseMemHandle(mapped);
  mapped_.clear();
}

std::unique_ptr<SharedPart> make_gpu_part(size_t bytes, std::string& why_not) {
  try {
    return std::make_unique<GpuPart>(bytes);
  } catch (const Error& error) {
    cudaGetLastError();
    if (error.code() == ErrorCode::kResourceExhausted) throw;
    why_not = error.what();
    return nullptr;
  }
}

}  // namespace tessera::comm
