// SPDX-License-Identifier: Apache-2.0
#include "comm/cuda/peer_memory.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "base/error.h"
#include "comm/cuda/ipc_block.h"
#include "comm/cuda/peer_sum.h"
#include "device/cuda/check.h"
#include "device/cuda/memory.h"

namespace tessera::comm {

namespace {

class IpcMemory final : public PeerMemory {
 public:
  IpcMemory(int rank, int world, const PeerMemorySize& size)
      : slots_(static_cast<size_t>(peer_slot_bytes(world, size.capacity)) +
                   static_cast<size_t>(size.more_slots) * sizeof(uint64_t),
               0xFF),
        zeros_(device::cuda::Memory::Kind::kDevice, kNumZeros * sizeof(float)),
        calls_(device::cuda::Memory::Kind::kDevice, device::kPeerCounters * sizeof(uint32_t)),
        ended_(device::cuda::Memory::Kind::kPinnedHost, sizeof(uint32_t)) {
    TESSERA_CUDA_CHECK(cudaMemset(zeros_.data(), 0, zeros_.size()));
    TESSERA_CUDA_CHECK(cudaMemset(calls_.data(), 0, calls_.size()));
    TESSERA_CUDA_CHECK(cudaDeviceSynchronize());
    *ended_.as<volatile uint32_t>() = 0;
    view_.rank = rank, view_.world = world, view_.capacity = size.capacity;
    view_.calls = calls_.as<uint32_t>();
    view_.ended = ended_.as<uint32_t>();
  }
  ~IpcMemory() override { disconnect(); }

  std::vector<uint8_t> address() const override { return slots_.address(); }

  std::string connect(std::span<const std::vector<uint8_t>> addresses) override {
    for (size_t r = 0; r < addresses.size(); ++r) {
      std::string why_not;
      void* data = static_cast<int>(r) == view_.rank ? slots_.data() : slots_.reach(addresses[r], why_not);
      if (data == nullptr) return fmt::format("memory of rank {}: {}", r, why_not);
      view_.slots[r] = static_cast<uint64_t*>(data);
    }
    return "";
  }
  void connect_to_itself() override {
    // Only ever with this rank's place among the senders added: then within the memory.
    for (int r = 0; r < view_.world; ++r) {
      view_.slots[r] = static_cast<uint64_t*>(slots_.data()) + (r - view_.rank) * view_.capacity;
    }
  }
  const device::PeerView& view() const override { return view_; }
  void* zeros() const override { return zeros_.data(); }
  void end() noexcept override { *ended_.as<volatile uint32_t>() = 1; }
  void disconnect() noexcept override { slots_.let_go(); }  // behind sums that were queued: end() lets them go

 private:
  IpcBlock slots_;
  device::cuda::Memory zeros_, calls_, ended_;
  device::PeerView view_;
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
