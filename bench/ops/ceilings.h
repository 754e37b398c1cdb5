// SPDX-License-Identifier: Apache-2.0
#pragma once
// What this machine can do at most, measured in the same run as what is held against it.
#include <cstdint>
#include <string>

#include "bench/ops/timing.h"
#include "device/machine.h"
#include "device/queue.h"

namespace tessera::bench {

// Reads every byte once with all threads of the queue; returns something that depends on all of them.
uint64_t read_bytes(const void* data, int64_t bytes, device::Queue& queue);

// A rate, of several measurements spread over the others'.
struct Ceiling {
  Ceiling(double rate = 0) : Ceiling(rate, rate) {}  // NOLINT: implicit, for what is measured once
  Ceiling(double the_best, double the_p10) : best(the_best), p10(the_p10) {}

  double best;  // what others are held against
  double p10;   // the slowest tenth is slower

  // False where other programs, heat or a limit of power made a tenth of the measurements much slower than the best.
  bool is_stable() const { return p10 >= 0.8 * best; }
};
// "37.4 GB/s (p10 30.1)".
std::string to_string(const Ceiling& ceiling, int digits, const char* unit);
// Of runs that each did `amount`.
Ceiling ceiling_of(double amount, const Samples& samples);

struct Ceilings {
  Ceiling read_gbs, read_one_gbs;  // bytes per second / 1e9 from memory: all threads, one thread
  Ceiling bf16_gflops;             // dot products of BF16 pairs, all threads; 0 without AVX512_BF16
  Ceiling amx_gflops;              // tiles; 0 without AMX
  // Of a GPU: copying within its memory (read + written), and BF16 products of mma.sync.
  Ceiling copy_gbs, mma_gflops;
  // What is not stable, for people: "read, AMX"; empty where all is.
  std::string unstable() const;
};
// `data`: several times the last-level cache, written before. Takes about two seconds.
Ceilings measure_ceilings(const device::Machine& machine, const void* data, int64_t bytes, device::Queue& queue);

// Loops of known length in registers, compiled for their instruction set.
float avx512_bf16_loop(int64_t num_steps);
int64_t avx512_bf16_flops(int64_t num_steps);
float amx_bf16_loop(int64_t num_steps);
int64_t amx_bf16_flops(int64_t num_steps);

}  // namespace tessera::bench
