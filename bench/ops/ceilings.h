// SPDX-License-Identifier: Apache-2.0
#pragma once
// What this machine can do at most, measured in the same run as what is held against it.
#include <cstdint>

#include "device/machine.h"
#include "device/queue.h"

namespace tessera::bench {

// Reads every byte once with all threads of the queue; returns something that depends on all of them.
uint64_t read_bytes(const void* data, int64_t bytes, device::Queue& queue);

struct Ceilings {
  double read_gbs = 0, read_one_gbs = 0;  // bytes per second / 1e9 from memory: all threads, one thread
  double bf16_gflops = 0;                 // dot products of BF16 pairs, all threads; 0 without AVX512_BF16
  double amx_gflops = 0;                  // tiles; 0 without AMX
  // Of a GPU: copying within its memory (read + written), and BF16 products of mma.sync.
  double copy_gbs = 0, mma_gflops = 0;
};
// `data`: several times the last-level cache.
Ceilings measure_ceilings(const device::Machine& machine, const void* data, int64_t bytes, device::Queue& queue);

// Loops of known length in registers, compiled for their instruction set.
float avx512_bf16_loop(int64_t num_steps);
int64_t avx512_bf16_flops(int64_t num_steps);
float amx_bf16_loop(int64_t num_steps);
int64_t amx_bf16_flops(int64_t num_steps);

}  // namespace tessera::bench
