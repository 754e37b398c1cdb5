// SPDX-License-Identifier: Apache-2.0
#pragma once
// A panel: 16 rows of a weight, packed so that the 16 lanes of a vector hold one or two inputs' weights of 16 outputs.
// Every linear map of the CPU backends is a loop over panels; kernels compute a panel's sums, all else is in
// linear.cc and moe.cc. Plain data: kernel files of every architecture include it.
//
// Blocks of 16 rows x 16 inputs follow each other along K. Inside a block, for row r and input k:
//   NVFP4  128 bytes: dword (k / 8) * 16 + r, nibble (k % 2) * 4 + k % 8 / 2; scales: one E4M3 byte per row, 16 a block
//   FP8    256 bytes: byte k / 4 * 64 + r / 4 * 16 + k % 4 / 2 * 8 + r % 4 * 2 + k % 2; scales as in the checkpoint
//   BF16   512 bytes: word k / 2 * 32 + r * 2 + k % 2
//   F32   1024 bytes: dword k * 16 + r
// so that a 32-bit lane is a row and its halves are two neighbours in K. Two panels lie together: block 0 of one, block
// 0 of the other, block 1 of one, ..., and likewise their NVFP4 scales, so that a kernel which works on both reads one
// stream. The last of an odd number of panels lies alone.
#include <cstdint>

namespace tessera::backends::cpu_common {

constexpr int64_t kPanelRows = 16;
constexpr int64_t kPanelBlock = 16;  // inputs
// Panels and rows of x that one call of a kernel handles at most; a backend may prefer fewer.
constexpr int64_t kJobPanels = 16, kJobRows = 128;
// NVFP4 kernels multiply by E4M3 scale / 256 (an FP16 conversion), which the factor of a sum makes good.
constexpr float kNvfp4ScaleUnit = 256;

struct Panel {
  const uint8_t* data;
  const void* scales;  // NVFP4: E4M3 [cols / 16][16]; FP8: FP32 [ceil(cols / 128)]; else null
  int64_t stride;      // blocks from one to the next, and NVFP4 scales likewise: 2, or 1 for a panel that lies alone
};

// x in tiles, as AMX loads them: [block of 32 rows][32 inputs after another][row][32], BF16; the last block has the
// rows that are left, and a block takes the room of its rows. A tile is consecutive cache lines, and what follows it is
// the next tile of a sum.
constexpr int64_t kTileBlock = 32, kTileSteps = 32;  // rows, inputs

// sums[panel][row][16] = x . w without factors; up to 8 slots behind the last row may be written.
struct PanelJob {
  Panel panels[kJobPanels];
  int64_t num_panels;
  int64_t cols;        // a multiple of 16
  const void* rows;    // x, BF16 or FP32 as the kernel wants
  int64_t row_stride;  // bytes; in tiles: of a row, 2 * cols
  bool is_tiled;       // x is in tiles; rows begin with a block
  int64_t num_rows;    // 1 to kJobRows
  float* sums;         // 64-byte aligned; room for [num_panels][kSumRows][16]
};
constexpr int64_t kSumRows = kJobRows + 8;

using PanelKernel = void (*)(const PanelJob& job);

// out[row][n] = sum * factor[row], rounded to BF16 (nearest even) or as FP32.
struct StoreJob {
  const float* sums;  // as of a PanelJob
  int64_t num_panels, num_rows;
  const float* factors;  // [num_rows]
  void* out;             // row-major
  bool is_f32;
  int64_t row_elements;    // from one row to the next
  const int32_t* row_ids;  // [num_rows]: which rows of `out`; null: consecutive
  int64_t first_n, end_n;  // the first panel's outputs begin at first_n; none at or behind end_n is written
};
using StoreKernel = void (*)(const StoreJob& job);

// h[row][n] = silu(min(gate, limit)) * clamp(up, -limit, limit) * routing[row]; gate, up and h rounded to BF16.
struct GateJob {
  const float *gates, *ups;  // sums, as of PanelJobs
  int64_t num_panels, num_rows;
  const float *gate_factors, *up_factors, *routing;  // [num_rows]
  float limit;                                       // 0: none
  uint16_t* h;
  int64_t row_elements, first_n, end_n;  // as of a StoreJob
};
using GateKernel = void (*)(const GateJob& job);

}  // namespace tessera::backends::cpu_common
