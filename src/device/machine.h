// SPDX-License-Identifier: Apache-2.0
#pragma once
// What this machine is: probed once, passed to whoever chooses.
#include <cstdint>
#include <optional>
#include <string>

#include "device/gpu_facts.h"

namespace tessera::device {

// Instruction sets that both the processor and the operating system offer.
struct CpuFeatures {
  bool avx2 = false;         // with FMA and F16C: x86-64-v3
  bool avx512 = false;       // F, BW, VL, DQ and VBMI
  bool avx512_bf16 = false;  // dot products of BF16 pairs
  bool amx_bf16 = false;     // tiles, their BF16 product, and the kernel's permission to use them
};

struct Machine {
  std::string cpu_name;
  int num_cores = 1;  // that this process may use
  uint64_t memory_total_bytes = 0;
  uint64_t memory_available_bytes =
      0;  // the least of: what the kernel says, the control group's limit, the address-space limit
  CpuFeatures cpu;
  // The GPU that shall compute, in whose memory all data lies then (device/gpu_executor.h fills it); none: the CPU
  // computes.
  std::optional<GpuDevice> gpu;
  std::string backends;  // TESSERA_BACKENDS: the only ones to use besides the reference, comma-separated; empty: all

  // Where data lies: of the GPU that computes, when it was found, else of the host.
  uint64_t free_bytes() const { return gpu.has_value() ? gpu->memory_free_bytes : memory_available_bytes; }
};

// Cores that this process may use: those of its affinity, at most its control group's share; at least 1.
int usable_cores();

// The most physical memory that this process has held so far, in bytes; 0 where the system does not say.
uint64_t peak_memory_bytes();

// Asks the kernel for AMX tiles where the processor has them: a permission of the whole process, inherited by threads.
Machine probe_machine();

}  // namespace tessera::device
