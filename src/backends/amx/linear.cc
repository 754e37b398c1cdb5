// SPDX-License-Identifier: Apache-2.0
// Panel sums by tiles: C[row of x][row of the weight] += A[row of x][32 inputs] B[16 input pairs][row of the weight].
// A panel's decoded block pairs are B as they lie; rows of x are A as they lie.
//
// What bounds it: at few rows decoding (few_rows.h has up to three); from about a hundred the products: each decoded
// weight serves up to 128 rows of x, and rows of x, in tiles, 16 panels.
// Order of a sum: per 32 inputs the tile instruction adds even and odd products in two chains and their sum to C, K
// ascending; FP8 weights begin a new C every 128 inputs, which is multiplied by the scale and added. few_rows.h
// computes the same bits.
#include <immintrin.h>

#include "backends/amx/few_rows.h"
#include "backends/amx/formats.h"
#include "backends/amx/kernels.h"
#include "backends/amx/tiles.h"
#include "base/integer_math.h"

namespace tessera::backends::amx {

namespace {

// Inputs decoded at a time: two panels of this chunk and of the next are 32 KiB, in the first-level cache.
constexpr int64_t kChunk = 256;
constexpr int64_t kChunkBytes = kChunk / kTileInputs * kTileBytes;

// A chunk: inputs [begin, end) of a pair of panels; an odd panel goes with itself. All pairs of some inputs follow each
// other, so that their rows of x are still in the second-level cache.
struct Chunk {
  int64_t panels[2], begin, end;
  int64_t num_panels() const { return panels[0] == panels[1] ? 1 : 2; }
  int64_t num_tiles() const { return (end - begin) / kTileInputs; }
};

inline Chunk chunk_at(const PanelJob& job, int64_t index) {
  const int64_t pairs = (job.num_panels + 1) / 2, p = index % pairs * 2, begin = index / pairs * kChunk;
  return {{p, p + 1 < job.num_panels ? p + 1 : p}, begin, begin + kChunk < job.cols ? begin + kChunk : job.cols};
}

// Makes B tiles of a chunk, some blocks at every step, so that vectors decode the next chunk while tiles multiply this.
template <class F>
class Decoder {
 public:
  explicit Decoder(const PanelJob& job) : job_(job) {}

  // Decodes `chunk` to tiles[panel] within `num_steps` steps.
  void begin(const Chunk& chunk, uint8_t* tiles, int64_t num_steps) {
    chunk_ = chunk, tiles_ = tiles, num_steps_ = num_steps;
    num_blocks_ = chunk.num_panels() * chunk.num_tiles() * 2;
    done_ = credit_ = 0;
  }

  void step() {
    for (credit_ += num_blocks_; credit_ >= num_steps_; credit_ -= num_steps_) decode_block();
  }

 private:
  // Blocks of both panels in turn, as they lie in memory.
  void decode_block() {
    const int64_t is_pair = chunk_.num_panels() - 1, p = done_ & is_pair, i = done_ >> is_pair;
    const Panel& panel = job_.panels[chunk_.panels[p]];
    const int64_t block_idx = chunk_.begin / kPanelBlock + i;
    const uint8_t* block = panel.data + block_idx * panel.stride * F::kBlockBytes;
    F::prefetch(panel, block_idx, block);
    F::decode(panel, block, block_idx, tiles_ + p * kChunkBytes + i * (kTileBytes / 2));
    ++done_;
  }

  const PanelJob& job_;
  Chunk chunk_{};
  uint8_t* tiles_ = nullptr;
  int64_t num_blocks_ = 0, num_steps_ = 1, done_ = 0, credit_ = 0;
};

// C of up to 32 rows and two panels: rows 0 to 15 here, the others behind them. In tiles: A by half of the rows, B by
// panel.
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

inline void store_sums(const Sums& sums) {
  _tile_stored(0, sums.panels[0], 64);
  _tile_stored(1, sums.panels[1], 64);
  if (!sums.has_lower) return;
  _tile_stored(2, sums.panels[0] + kTileRows * kPanelRows, 64);
  _tile_stored(3, sums.panels[1] + kTileRows * kPanelRows, 64);
}

// What of x is fetched into the second-level cache meanwhile: bytes [begin, end) behind each step's.
struct Ahead {
  int64_t begin, end;
};

// `count` B tiles of both panels against x; a step of the decoder for each.
template <class F>
void multiply(XRows x, bool has_lower, const uint8_t* b0, const uint8_t* b1, int64_t count, const Ahead& ahead,
              Decoder<F>& next) {
  for (int64_t i = 0; i < count; ++i, x.data += x.step) {
    _tile_loadd(6, b0 + i * kTileBytes, 64);
    _tile_loadd(7, b1 + i * kTileBytes, 64);
    _tile_loadd(4, x.data, x.stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (has_lower) {
      _tile_loadd(5, x.data + kTileRows * x.stride, x.stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    for (int64_t byte = ahead.begin; byte < ahead.end; byte += 64) _mm_prefetch(x.data + byte, _MM_HINT_T1);
    next.step();
  }
}

// Tiles of the next inputs, which follow those of this chunk: each pair of panels fetches its share of every tile.
inline Ahead ahead_of(const PanelJob& job, const Chunk& chunk, int64_t rows, int64_t step) {
  if (!job.is_tiled || chunk.end + kChunk > job.cols) return {0, 0};
  const int64_t pairs = ceil_div(job.num_panels, int64_t{2}), pair = chunk.panels[0] / 2;
  const int64_t behind = chunk.num_tiles() * step;
  return {behind + pair * rows / pairs * 64, behind + (pair + 1) * rows / pairs * 64};
}

// A decoded chunk against rows [row, row + rows) of x.
template <class F>
void run_rows(const PanelJob& job, const Chunk& chunk, const uint8_t* tiles, int64_t row, int64_t rows,
              Decoder<F>& next) {
  XRows x = x_rows(job, row, rows);
  x.data += chunk.begin / kTileInputs * x.step;
  const Ahead ahead = ahead_of(job, chunk, rows, x.step);
  const uint8_t *b0 = tiles, *b1 = tiles + (chunk.num_panels() - 1) * kChunkBytes;
  Sums sums{{}, rows > kTileRows};
  for (int p = 0; p < 2; ++p) sums.panels[p] = job.sums + (chunk.panels[p] * kSumRows + row) * kPanelRows;
  if (!F::kHasGroupScales) {
    chunk.begin == 0 ? zero_sums() : load_sums(sums);
    multiply<F>(x, sums.has_lower, b0, b1, chunk.num_tiles(), ahead, next);
    store_sums(sums);
    return;
  }
  alignas(64) float part[2][2 * kTileRows * kPanelRows];
  for (int64_t k = chunk.begin; k < chunk.end; k += kGroup) {
    const int64_t size = k + kGroup < chunk.end ? kGroup : chunk.end - k;
    const int64_t at = (k - chunk.begin) / kTileInputs * kTileBytes;
    zero_sums();
    multiply<F>(x, sums.has_lower, b0 + at, b1 + at, size / kTileInputs, ahead, next);
    x.data += size / kTileInputs * x.step;
    store_sums({{part[0], part[1]}, sums.has_lower});
    fence();
    for (int64_t p = 0; p < chunk.num_panels(); ++p) {
      add_scaled(part[p], group_scale(job.panels[chunk.panels[p]], k), rows, k == 0, sums.panels[p]);
    }
  }
}

template <class F>
void sum(const PanelJob& job) {
  if (job.num_rows <= kMostFewRows) return sum_few_rows<F>(job);
  constexpr int64_t kRows = 2 * kTileRows;
  alignas(64) uint8_t tiles[2][2 * kChunkBytes];
  const int64_t num_chunks = ceil_div(job.num_panels, int64_t{2}) * ceil_div(job.cols, kChunk);
  int64_t configured = 0;
  Decoder<F> next(job);
  next.begin(chunk_at(job, 0), tiles[0], 1);
  next.step();
  for (int64_t c = 0; c < num_chunks; ++c) {
    const Chunk chunk = chunk_at(job, c);
    const int64_t num_steps = ceil_div(job.num_rows, kRows) * chunk.num_tiles();
    next.begin(c + 1 < num_chunks ? chunk_at(job, c + 1) : Chunk{}, tiles[(c + 1) % 2], num_steps);
    fence();
    for (int64_t row = 0; row < job.num_rows; row += kRows) {
      const int64_t rows = job.num_rows - row < kRows ? job.num_rows - row : kRows;
      if (rows != configured) configure(configured = rows);
      run_rows<F>(job, chunk, tiles[c % 2], row, rows, next);
    }
    fence();
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
