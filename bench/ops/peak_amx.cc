// SPDX-License-Identifier: Apache-2.0
// The most BF16 products that tiles reach: four sums, two left and two right operands, all in registers.
#include <immintrin.h>

#include "bench/ops/ceilings.h"

namespace tessera::bench {

float amx_bf16_loop(int64_t num_steps) {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  alignas(64) uint16_t operand[512];
  alignas(64) float sums[256] = {};
  for (int i = 0; i < 512; ++i) operand[i] = static_cast<uint16_t>(0x3C00 + (i * 37 & 0x7F));
  // GCC 12's intrinsics do not say which memory they read.
  const Config* volatile visible = &config;
  const uint16_t* volatile operands = operand;
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
  _tile_loadconfig(visible);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, operands, 64);
  _tile_loadd(5, operands, 64);
  _tile_loadd(6, operands, 64);
  _tile_loadd(7, operands, 64);
  for (int64_t step = 0; step < num_steps; ++step) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_release();
  return sums[0] + sums[255];
}

int64_t amx_bf16_flops(int64_t num_steps) {
  return num_steps * 4 * 16 * 16 * 32 * 2;
}

}  // namespace tessera::bench
