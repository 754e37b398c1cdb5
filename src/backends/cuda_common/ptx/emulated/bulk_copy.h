// SPDX-License-Identifier: Apache-2.0
#pragma once
// What ptx/bulk_copy.cuh does on the emulated GPU. A barrier's 64 bits: arrivals of a phase, arrivals still to come,
// the phase's number and the bytes announced that have not come.
#include <cstdint>
#include <cstring>
#include <memory>

#include "device/cuda/emulated/block.h"

namespace tessera::backends::cuda_common::ptx::emulated {

struct BarrierState {
  uint8_t count, pending;
  uint16_t phase;
  int32_t bytes;
};
static_assert(sizeof(BarrierState) == sizeof(uint64_t));

inline BarrierState load_barrier(const uint64_t* bits) {
  BarrierState state;
  std::memcpy(&state, bits, sizeof state);
  return state;
}

inline void store_barrier(uint64_t* bits, BarrierState state) {
  if (state.pending == 0 && state.bytes == 0) state.pending = state.count, ++state.phase;
  std::memcpy(bits, &state, sizeof state);
}

inline void init_barrier(uint64_t* bits, int count) {
  if (count < 1 || count > 255)
    device::emulated::fail("a barrier for no thread, or for more than the emulation counts");
  const auto arrivals = static_cast<uint8_t>(count);
  store_barrier(bits, {arrivals, arrivals, 0, 0});
}

inline void arrive(uint64_t* bits, int bytes) {
  BarrierState state = load_barrier(bits);
  if (state.pending == 0) device::emulated::fail("more threads arrive at a barrier than it counts");
  state.bytes += bytes;
  --state.pending;
  store_barrier(bits, state);
}

struct BarrierPhase {
  const uint64_t* bits;
  int parity;
};

inline void wait(const uint64_t* bits, int parity) {
  BarrierPhase awaited{bits, parity};
  device::emulated::wait_until(
      device::emulated::Site::current(),
      [](const void* context) {
        const auto& phase = *static_cast<const BarrierPhase*>(context);
        return load_barrier(phase.bits).phase % 2 != phase.parity % 2;
      },
      &awaited, "a barrier in shared memory");
}

class BulkCopy final : public device::emulated::LateWork {
 public:
  BulkCopy(void* shared, const void* global, int bytes, uint64_t* arrived)
      : shared_(shared), global_(global), bytes_(bytes), arrived_(arrived) {}
  void make() const override {
    std::memcpy(shared_, global_, static_cast<size_t>(bytes_));
    BarrierState state = load_barrier(arrived_);
    state.bytes -= bytes_;
    store_barrier(arrived_, state);
  }

 private:
  void* shared_;
  const void* global_;
  int bytes_;
  uint64_t* arrived_;
};

inline void copy_bulk(void* shared, const void* global, int bytes, uint64_t* arrived) {
  const auto is_aligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  if (!is_aligned(shared) || !is_aligned(global) || bytes <= 0 || bytes % 16 != 0) {
    device::emulated::fail("a bulk copy is misaligned");
  }
  device::emulated::engine_work_late(std::make_unique<BulkCopy>(shared, global, bytes, arrived));
}

}  // namespace tessera::backends::cuda_common::ptx::emulated
