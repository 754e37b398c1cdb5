// SPDX-License-Identifier: Apache-2.0
// Panel sums by tiles: C[row of x][row of the weight] += A[row of x][32 inputs] B[16 input pairs][row of the weight].
// A panel's decoded block pairs are B as they lie; rows of x are A as they lie.
//
// What bounds it: at one token the packed bytes and decoding them; from about a hundred rows the products: each decoded
// weight serves up to 256 rows of x.
// Order of a sum: per 32 inputs the tile instruction adds even and odd products in two chains and their sum to C, K
// ascending; FP8 weights begin a new C every 128 inputs, which is multiplied by the scale and added. The same
// instructions run at every number of rows.
#include <immintrin.h>

#include "backends/amx/kernels.h"
#include "backends/cpu_common/avx512_decode.h"

namespace tessera::backends::amx {

namespace {

using cpu_common::kPanelRows;
using cpu_common::kSumRows;
using cpu_common::Panel;
using cpu_common::PanelJob;

constexpr int64_t kTileRows = 16, kTileInputs = 32, kTileBytes = 1024;
constexpr int64_t kChunk = 512;  // inputs decoded at a time: two panels are 32 KiB, in the first-level cache
constexpr int64_t kGroup = 128;  // inputs per FP8 scale
constexpr int64_t kPrefetchBytes = 2048;

// Tiles 0 to 3: C by (half of the rows, panel); 4, 5: A by half; 6, 7: B by panel.
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

// Tiles for `rows` (1 to 32) rows of x.
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

struct Nvfp4 {
  static constexpr int kBlockBytes = 128;
  static constexpr bool kHasGroupScales = false;
  // Code x scale has at most six significant bits: both products are BF16 values.
  static void decode(const Panel& panel, const uint8_t* block, int64_t block_idx, uint8_t* out) {
    const __m512 scales = cpu_common::nvfp4_scales(panel.scales, block_idx * panel.stride);
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const __m512i codes = cpu_common::nvfp4_pair(block, i);
      const __m512 even = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(codes, 16)), scales);
      const __m512 odd = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(codes, upper)), scales);
      const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
      _mm512_store_si512(out + i * 64, _mm512_or_si512(low, _mm512_castps_si512(odd)));
    }
  }
};

struct Fp8 {
  static constexpr int kBlockBytes = 256;
  static constexpr bool kHasGroupScales = true;
  static void decode(const Panel&, const uint8_t* block, int64_t, uint8_t* out) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) _mm512_store_si512(out + i * 64, cpu_common::fp8_pair(block, i));
  }
};

struct Bf16 {
  static constexpr int kBlockBytes = 512;
  static constexpr bool kHasGroupScales = false;
  static void decode(const Panel&, const uint8_t* block, int64_t, uint8_t* out) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) _mm512_store_si512(out + i * 64, cpu_common::bf16_pair(block, i));
  }
};

// Inputs [begin, end) of a panel as B tiles, one after another.
template <class F>
void decode_chunk(const Panel& panel, int64_t begin, int64_t end, uint8_t* tiles) {
  const int64_t step = panel.stride * F::kBlockBytes;
  for (int64_t k = begin; k < end; k += cpu_common::kPanelBlock, tiles += kTileBytes / 2) {
    const int64_t block_idx = k / cpu_common::kPanelBlock;
    const uint8_t* block = panel.data + block_idx * step;
    for (int line = 0; line < F::kBlockBytes; line += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(block) + kPrefetchBytes + line, _MM_HINT_T0);
    }
    F::decode(panel, block, block_idx, tiles);
  }
}

// C of up to 32 rows and two panels: rows 0 to 15 here, the others behind them.
struct Sums {
  float* panels[2];
  bool has_lower;
};

inline void load_sums(const Sums& sums) {
  _tile_loadd(0, sums.panels[0], 64);
  _tile_loadd(1, sums.panels[1], 64);
  if (!sums.has_lower) return;
  _tile_loadd(2, sums.panels[0] + kTileRows * kPanelRows, 64);
  _tile_loadd(3, sums.panels[1] + kTileRows * kPanelRows, 64);
}

inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

inline void store_sums(const Sums& sums) {
  _tile_stored(0, sums.panels[0], 64);
  _tile_stored(1, sums.panels[1], 64);
  if (!sums.has_lower) return;
  _tile_stored(2, sums.panels[0] + kTileRows * kPanelRows, 64);
  _tile_stored(3, sums.panels[1] + kTileRows * kPanelRows, 64);
}

// `count` B tiles of both panels against x.
inline void multiply(const char* x, int64_t stride, bool has_lower, const uint8_t* b0, const uint8_t* b1,
                     int64_t count) {
  const char* lower = x + kTileRows * stride;
  for (int64_t i = 0; i < count; ++i) {
    _tile_loadd(6, b0 + i * kTileBytes, 64);
    _tile_loadd(7, b1 + i * kTileBytes, 64);
    _tile_loadd(4, x + i * 2 * kTileInputs, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (!has_lower) continue;
    _tile_loadd(5, lower + i * 2 * kTileInputs, stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// sums = part * scale + (is_first ? 0 : sums) over `rows` rows of a panel.
inline void add_scaled(const float* part, float scale, int64_t rows, bool is_first, float* sums) {
  const __m512 factor = _mm512_set1_ps(scale);
  for (int64_t t = 0; t < rows; ++t, part += kPanelRows, sums += kPanelRows) {
    const __m512 before = is_first ? _mm512_setzero_ps() : _mm512_load_ps(sums);
    _mm512_store_ps(sums, _mm512_fmadd_ps(_mm512_load_ps(part), factor, before));
  }
}

// Inputs [begin, end), decoded, of two panels against rows [row, row + rows) of x.
template <class F>
void run_rows(const PanelJob& job, const int64_t* panels, const uint8_t* const* tiles, int64_t begin, int64_t end,
              int64_t row, int64_t rows) {
  const char* x = static_cast<const char*>(job.rows) + row * job.row_stride + begin * 2;
  Sums sums{{}, rows > kTileRows};
  for (int p = 0; p < 2; ++p) sums.panels[p] = job.sums + (panels[p] * kSumRows + row) * kPanelRows;
  if (!F::kHasGroupScales) {
    begin == 0 ? zero_sums() : load_sums(sums);
    multiply(x, job.row_stride, sums.has_lower, tiles[0], tiles[1], (end - begin) / kTileInputs);
    store_sums(sums);
    return;
  }
  alignas(64) float part[2][2 * kTileRows * kPanelRows];
  for (int64_t k = begin; k < end; k += kGroup) {
    const int64_t size = k + kGroup < end ? kGroup : end - k, at = (k - begin) / kTileInputs * kTileBytes;
    zero_sums();
    multiply(x + (k - begin) * 2, job.row_stride, sums.has_lower, tiles[0] + at, tiles[1] + at, size / kTileInputs);
    store_sums({{part[0], part[1]}, sums.has_lower});
    fence();
    for (int p = 0; p < (panels[0] == panels[1] ? 1 : 2); ++p) {
      const float scale = static_cast<const float*>(job.panels[panels[p]].scales)[k / kGroup];
      add_scaled(part[p], scale, rows, k == 0, sums.panels[p]);
    }
  }
}

template <class F>
void sum(const PanelJob& job) {
  alignas(64) uint8_t decoded[2][kChunk / kTileInputs * kTileBytes];
  int64_t configured = 0;
  for (int64_t p = 0; p < job.num_panels; p += 2) {
    // An odd panel goes with itself.
    const int64_t panels[2] = {p, p + 1 < job.num_panels ? p + 1 : p};
    const uint8_t* const tiles[2] = {decoded[0], decoded[panels[1] - p]};
    for (int64_t begin = 0; begin < job.cols; begin += kChunk) {
      const int64_t end = begin + kChunk < job.cols ? begin + kChunk : job.cols;
      for (int64_t q = p; q <= panels[1]; ++q) decode_chunk<F>(job.panels[q], begin, end, decoded[q - p]);
      fence();
      for (int64_t row = 0; row < job.num_rows; row += 2 * kTileRows) {
        const int64_t rows = job.num_rows - row < 2 * kTileRows ? job.num_rows - row : 2 * kTileRows;
        if (rows != configured) configure(configured = rows);
        run_rows<F>(job, panels, tiles, begin, end, row, rows);
      }
      fence();
    }
  }
  _tile_release();
}

}  // namespace

void nvfp4(const PanelJob& job) {
  sum<Nvfp4>(job);
}
void fp8(const PanelJob& job) {
  sum<Fp8>(job);
}
void bf16(const PanelJob& job) {
  sum<Bf16>(job);
}

}  // namespace tessera::backends::amx
