// SPDX-License-Identifier: Apache-2.0
// Panel sums by tiles: C[row of x][row of the weight] += A[row of x][32 inputs] B[16 input pairs][row of the weight].
// A panel's decoded block pairs are B as they lie; rows of x are A as they lie.
//
// What bounds it: at few rows decoding (few_rows.h has up to four); from about a hundred the products: each decoded
// weight serves up to 256 rows of x.
// Order of a sum: per 32 inputs the tile instruction adds even and odd products in two chains and their sum to C, K
// ascending; FP8 weights begin a new C every 128 inputs, which is multiplied by the scale and added. few_rows.h
// computes the same bits.
#include <immintrin.h>

#include "backends/amx/few_rows.h"
#include "backends/amx/formats.h"
#include "backends/amx/kernels.h"

namespace tessera::backends::amx {

namespace {

constexpr int64_t kTileRows = 16, kTileBytes = 1024;
constexpr int64_t kChunk = 512;  // inputs decoded at a time: two panels are 32 KiB, in the first-level cache

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

// Inputs [begin, end) of a panel as B tiles, one after another.
template <class F>
void decode_chunk(const Panel& panel, int64_t begin, int64_t end, uint8_t* tiles) {
  const int64_t step = panel.stride * F::kBlockBytes;
  for (int64_t k = begin; k < end; k += kPanelBlock, tiles += kTileBytes / 2) {
    const int64_t block_idx = k / kPanelBlock;
    const uint8_t* block = panel.data + block_idx * step;
    F::prefetch(panel, block_idx, block);
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
      add_scaled(part[p], group_scale(job.panels[panels[p]], k), rows, k == 0, sums.panels[p]);
    }
  }
}

template <class F>
void sum(const PanelJob& job) {
  if (job.num_rows <= kMostFewRows) return sum_few_rows<F>(job);
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
