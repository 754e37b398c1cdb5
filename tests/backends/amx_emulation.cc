// SPDX-License-Identifier: Apache-2.0
#include "backends/amx_emulation.h"

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "backends/cpu_common/avx512_decode.h"

namespace {

// Eight tiles as Intel SDM volume 1, chapter 18 has them; TDPBF16PS in the order that hardware was seen to use: per row
// and column an even and an odd chain of fused multiply-adds from zero, then their sum added; denormals are zeros.
struct Tile {
  uint8_t bytes[16][64];
};
struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

thread_local Tile g_tiles[8];
thread_local TileConfig g_config;

void emulate_loadconfig(const void* config) {
  std::memcpy(&g_config, config, sizeof g_config);
  std::memset(g_tiles, 0, sizeof g_tiles);
}

void emulate_load(int tile, const void* base, int64_t stride) {
  std::memset(&g_tiles[tile], 0, sizeof(Tile));
  for (int r = 0; r < g_config.rows[tile]; ++r) {
    std::memcpy(g_tiles[tile].bytes[r], static_cast<const char*>(base) + r * stride, g_config.row_bytes[tile]);
  }
}

void emulate_store(int tile, void* base, int64_t stride) {
  for (int r = 0; r < g_config.rows[tile]; ++r) {
    std::memcpy(static_cast<char*>(base) + r * stride, g_tiles[tile].bytes[r], g_config.row_bytes[tile]);
  }
}

void emulate_zero(int tile) {
  std::memset(&g_tiles[tile], 0, sizeof(Tile));
}

float bf16_at(const uint8_t* row, int index) {
  uint16_t bits = 0;
  std::memcpy(&bits, row + 2 * index, 2);
  return tessera::numeric::bf16_to_float(bits);
}

// Not inlined: its arithmetic depends on MXCSR, which the compiler does not see.
__attribute__((noinline)) void add_products(int c, int a, int b) {
  for (int m = 0; m < g_config.rows[c]; ++m) {
    for (int n = 0; n < g_config.row_bytes[c] / 4; ++n) {
      float even = 0, odd = 0, sum = 0;
      for (int k = 0; k < g_config.row_bytes[a] / 4; ++k) {
        even = std::fma(bf16_at(g_tiles[a].bytes[m], 2 * k), bf16_at(g_tiles[b].bytes[k], 2 * n), even);
        odd = std::fma(bf16_at(g_tiles[a].bytes[m], 2 * k + 1), bf16_at(g_tiles[b].bytes[k], 2 * n + 1), odd);
      }
      std::memcpy(&sum, g_tiles[c].bytes[m] + 4 * n, 4);
      sum += even + odd;
      std::memcpy(g_tiles[c].bytes[m] + 4 * n, &sum, 4);
    }
  }
}

void emulate_products(int c, int a, int b) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);  // flush to zero, denormals are zeros
  add_products(c, a, b);
  _mm_setcsr(before);
}

}  // namespace

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) emulate_loadconfig(config)
#define _tile_release() static_cast<void>(0)
#define _tile_loadd(tile, base, stride) emulate_load(tile, base, stride)
#define _tile_stored(tile, base, stride) emulate_store(tile, base, stride)
#define _tile_zero(tile) emulate_zero(tile)
#define _tile_dpbf16ps(c, a, b) emulate_products(c, a, b)
#define amx amx_emulated
// The second compilation that this file is for.
#include "backends/amx/attention.cc"
#include "backends/amx/index_scores.cc"
#include "backends/amx/linear.cc"
