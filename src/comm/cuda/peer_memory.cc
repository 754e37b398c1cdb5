// SPDX-License-Identifier: Apache-2.0
#include "comm/cuda/peer_memory.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/file.h"
#include "comm/cuda/peer_sum.h"
#include "comm/message.h"
#include "device/cuda/check.h"
#include "device/cuda/memory.h"

namespace tessera::comm {

namespace {

constexpr uint64_t kMaxIdBytes = 64;

struct Address {
  char machine[kMaxIdBytes] = {};  // of its current run
  Nonce process{};                 // containers of one machine have equal process numbers
  int64_t ordinal = 0;
  void* data = nullptr;  // in that process
  cudaIpcMemHandle_t handle{};
};

// The same for all ranks that are threads of this process, and for nobody else.
const Nonce& this_process() {
  static const Nonce number = random_nonce();
  return number;
}

std::string words(cudaError_t code) {
  cudaGetLastError();  // what was reported here shall not surface in a later call
  return fmt::format("{} ({})", cudaGetErrorName(code), cudaGetErrorString(code));
}

class IpcMemory final : public PeerMemory {
 public:
  IpcMemory(int rank, int world, const PeerMemorySize& size)
      : slots_(device::cuda::Memory::Kind::kDevice, static_cast<size_t>(peer_slot_bytes(world, size.capacity)) +
                                                        static_cast<size_t>(size.more_slots) * sizeof(uint64_t)),
        calls_(device::cuda::Memory::Kind::kDevice, device::kPeerCounters * sizeof(uint32_t)),
        ended_(device::cuda::Memory::Kind::kPinnedHost, sizeof(uint32_t)) {
    TESSERA_CUDA_CHECK(cudaMemset(slots_.data(), 0xFF, slots_.size()));
    TESSERA_CUDA_CHECK(cudaMemset(calls_.data(), 0, calls_.size()));
    TESSERA_CUDA_CHECK(cudaDeviceSynchronize());
    *ended_.as<volatile uint32_t>() = 0;
    view_.rank = rank, view_.world = world, view_.capacity = size.capacity;
    view_.calls = calls_.as<uint32_t>();
    view_.ended = ended_.as<uint32_t>();
    const std::string machine = read_file("/proc/sys/kernel/random/boot_id", kMaxIdBytes);
    std::memcpy(own_.machine, machine.data(), std::min(machine.size(), sizeof(own_.machine)));
    own_.process = this_process();
    int ordinal = 0;
    TESSERA_CUDA_CHECK(cudaGetDevice(&ordinal));
    own_.ordinal = ordinal;
    own_.data = slots_.data();
    TESSERA_CUDA_CHECK(cudaIpcGetMemHandle(&own_.handle, slots_.data()));
  }
  ~IpcMemory() override { disconnect(); }

  std::vector<uint8_t> address() const override {
    std::vector<uint8_t> bytes(sizeof(own_));
    std::memcpy(bytes.data(), &own_, bytes.size());
    return bytes;
  }

  std::string connect(std::span<const std::vector<uint8_t>> addresses) override {
    for (size_t r = 0; r < addresses.size(); ++r) {
      Address address;
      if (addresses[r].size() != sizeof(address)) return fmt::format("rank {} says nothing of its memory", r);
      std::memcpy(&address, addresses[r].data(), sizeof(address));
      if (std::memcmp(address.machine, own_.machine, sizeof(own_.machine)) != 0) {
        return fmt::format("rank {} is on another machine", r);
      }
      const std::string why = static_cast<int>(r) == view_.rank ? keep(r, own_.data) : reach(r, address);
      if (!why.empty()) return fmt::format("memory of rank {}: {}", r, why);
    }
    return "";
  }
  void connect_to_itself() override {
    // Only ever with this rank's place among the senders added: then within the memory.
    for (int r = 0; r < view_.world; ++r) {
      view_.slots[r] = slots_.as<uint64_t>() + (r - view_.rank) * view_.capacity;
    }
  }
  const device::PeerView& view() const override { return view_; }
  void end() noexcept override { *ended_.as<volatile uint32_t>() = 1; }
  void disconnect() noexcept override {
    cudaDeviceSynchronize();  // sums that were queued: end() lets them go
    for (void* mapped : mapped_) cudaIpcCloseMemHandle(mapped);
    mapped_.clear();
  }

 private:
  std::string keep(size_t rank, void* data) {
    view_.slots[rank] = static_cast<uint64_t*>(data);
    return "";
  }
  std::string reach(size_t rank, const Address& address) {
    // A handle opens in another process only.
    if (address.process == own_.process) {
      const cudaError_t code = cudaDeviceEnablePeerAccess(static_cast<int>(address.ordinal), 0);
      if (code != cudaSuccess && code != cudaErrorPeerAccessAlreadyEnabled) return words(code);
      cudaGetLastError();
      return keep(rank, address.data);
    }
    void* mapped = nullptr;
    const cudaError_t code = cudaIpcOpenMemHandle(&mapped, address.handle, cudaIpcMemLazyEnablePeerAccess);
    if (code != cudaSuccess) return words(code);
    mapped_.push_back(mapped);
    return keep(rank, mapped);
  }

  device::cuda::Memory slots_, calls_, ended_;
  Address own_;
  device::PeerView view_;
  std::vector<void*> mapped_;
};

}  // namespace

std::unique_ptr<PeerMemory> make_peer_memory(int rank, int world, const PeerMemorySize& size, std::string& why_not) {
  try {
    return std::make_unique<IpcMemory>(rank, world, size);
  } catch (const Error& error) {
    cudaGetLastError();
    why_not = error.what();
    return nullptr;
  }
}

}  // namespace tessera::comm
