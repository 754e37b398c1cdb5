// SPDX-License-Identifier: Apache-2.0
#pragma once
// Setting tiles up. Included by kernel files of this folder only: all names are local to the file.
#include <immintrin.h>

#include <cstdint>

namespace tessera::backends::amx {

namespace {

constexpr int64_t kTileRows = 16, kTileBytes = 1024;
constexpr int64_t kUnits = 16;  // of 4 bytes, of a row
constexpr int64_t kTileInputs = 2 * kUnits;

// Tiles 0 to 3 are sums, C by (A, B); 4, 5: A; 6, 7: B.
struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// The compiler does not know what memory tile instructions touch: what they load is written before a fence, what they
// stored is read behind one.
inline void fence() {
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

// Tiles for `rows` (1 to 32) rows of both A together.
inline void configure(int64_t rows) {
  const uint8_t upper = static_cast<uint8_t>(rows < kTileRows ? rows : kTileRows);
  const uint8_t lower = static_cast<uint8_t>(rows > kTileRows ? rows - kTileRows : 1);
  const TileConfig config = {
      1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {upper, upper, lower, lower, upper, lower, 16, 16}};
  // Through a volatile pointer, since GCC 12's intrinsic names only the first bytes as its input.
  const TileConfig* volatile visible = &config;
  fence();
  _tile_loadconfig(visible);
}

// Whole tiles until the end of the scope.
class WholeTiles {
 public:
  WholeTiles() { configure(2 * kTileRows); }
  ~WholeTiles() { _tile_release(); }
  WholeTiles(const WholeTiles&) = delete;
  WholeTiles& operator=(const WholeTiles&) = delete;
};

inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// 16 x 16 units; strides in units.
inline void transpose_units(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(from + i * from_stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  // a[4 i + j]: in each lane of 128 bits l, units 4 l + j of rows 4 i to 4 i + 3.
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i low0 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), low1 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xDD);
    const __m512i high0 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88),
                  high1 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xDD);
    _mm512_storeu_si512(to + j * to_stride, _mm512_shuffle_i32x4(low0, high0, 0x88));
    _mm512_storeu_si512(to + (4 + j) * to_stride, _mm512_shuffle_i32x4(low1, high1, 0x88));
    _mm512_storeu_si512(to + (8 + j) * to_stride, _mm512_shuffle_i32x4(low0, high0, 0xDD));
    _mm512_storeu_si512(to + (12 + j) * to_stride, _mm512_shuffle_i32x4(low1, high1, 0xDD));
  }
}

}  // namespace

}  // namespace tessera::backends::amx
