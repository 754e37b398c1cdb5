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
// so that a 32-bit lane is a row and its halves are two neighbours in K.
#include <cstdint>

namespace tessera::backends::cpu_common {

constexpr int64_t kPanelRows = 16;
constexpr int64_t kPanelBlock = 16;  // inputs
// Panels and rows of x that one call of a kernel handles at most.
constexpr int64_t kJobPanels = 4, kJobRows = 72;
// NVFP4 kernels multiply by E4M3 scale / 256 (an FP16 conversion), which the factor of a sum makes good.
constexpr float kNvfp4ScaleUnit = 256;

struct Panel {
  const uint8_t* data;
  const void* scales;  // NVFP4: E4M3 [cols / 16][16]; FP8: FP32 [ceil(cols / 128)]; else null
};

// sums[panel][row][16] = x . w without factors; slots of rows from num_rows to the next multiple of 16 may be written.
struct PanelJob {
  Panel panels[kJobPanels];
  int64_t num_panels;
  int64_t cols;        // a multiple of 16
  const void* rows;    // x, BF16 or FP32 as the kernel wants
  int64_t row_stride;  // bytes
  int64_t num_rows;    // 1 to kJobRows
  float* sums;         // 64-byte aligned; room for [num_panels][kSumRows][16]
};
constexpr int64_t kSumRows = (kJobRows + 15) / 16 * 16;

using PanelKernel = void (*)(const PanelJob& job);

}  // namespace tessera::backends::cpu_common
