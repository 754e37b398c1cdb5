// SPDX-License-Identifier: Apache-2.0
#pragma once
// Thread blocks with products of tensor cores in them, on the emulated GPU: operands laid out by the ISA's tables, and
// the instructions that a sound kernel gives, of one block or of a pair, for tests to change a part of.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "backends/cuda_common/ptx/cluster.cuh"
#include "backends/cuda_common/ptx/tcgen05.cuh"
#include "backends/cuda_common/tcgen05_operands.h"
#include "backends/sums_mode.h"
#include "testing/op_harness.h"

namespace tessera::testing::tcgen05_blocks {

namespace ptx = backends::cuda_common::ptx;
namespace tcgen05 = ptx::tcgen05;
using namespace backends::cuda_common;

constexpr int kM = 128, kMostN = 256, kSteps = 4;  // rows of a block; 256 columns: four products

// Shared memory of a block. 128-byte swizzle: from 0 and from 16 K on; scales: an atom per step and 128 rows.
struct Shared {
  uint8_t a[kM * 128], b[kMostN * 128];
  uint8_t a_scales[kSteps][512], b_scales[kSteps][2][512];
  ptx::SharedBarrier done, never, unmade;
  uint32_t memory;
};
constexpr int kScalesOfA = 256, kScalesOfB = 264;  // columns, of two steps

inline Shared& shared() {
  return *static_cast<Shared*>(device::emulated::dynamic_shared());
}

struct Said {
  bool is_sound;
  std::string line;
};

// Runs a block of `threads` threads, or a cluster of such.
template <class Kernel>
Said run_blocks(int threads, const Kernel& kernel, int num_blocks = 1) {
  class Code final : public device::emulated::ThreadCode {
   public:
    explicit Code(const Kernel& called) : kernel_(called) {}
    void run() const override { kernel_(); }

   private:
    const Kernel& kernel_;
  };
  ::testing::internal::CaptureStderr();
  const bool is_sound = device::emulated::run_grid(Code(kernel), dim3(static_cast<unsigned>(num_blocks)),
                                                   dim3(static_cast<unsigned>(threads)), sizeof(Shared), num_blocks);
  return {is_sound, ::testing::internal::GetCapturedStderr()};
}

inline int thread() {
  return static_cast<int>(threadIdx.x);
}

// Codes and scales of a product's operands, row by row.
struct Operands {
  int n, num_blocks;
  std::vector<uint8_t> a, b, a_scales, b_scales;  // [rows][128 bytes], [rows][16]

  // What block `of_pair` has: 128 rows of A with their scales, its part of B and all of B's scales.
  void place(Shared& s, int of_pair = ptx::cluster_rank()) const {
    const size_t rank = static_cast<size_t>(of_pair);
    const auto lay = [](const std::vector<uint8_t>& rows, size_t first, size_t count, uint8_t* to) {
      for (size_t at = 0; at < count * 128; ++at) {
        const size_t m = at / 128, kb = at % 128;  // the table of the 128-byte swizzle
        to[(m / 8) * 1024 + (m % 8) * 128 + ((kb / 16) ^ (m % 8)) * 16 + kb % 16] = rows[first * 128 + at];
      }
    };
    const size_t b_rows = static_cast<size_t>(n / num_blocks);
    lay(a, rank * kM, kM, s.a), lay(b, rank * b_rows, b_rows, s.b);
    for (int step = 0; step < kSteps; ++step) {
      const auto lay_scales = [&](const std::vector<uint8_t>& rows, size_t first, size_t count, uint8_t* to) {
        for (size_t row = 0; row < count; ++row) {
          for (size_t j = 0; j < 4; ++j) {
            to[row / 128 * 512 + row % 32 * 16 + row % 128 / 32 * 4 + j] =
                rows[(first + row) * 16 + static_cast<size_t>(step) * 4 + j];
          }
        }
      };
      lay_scales(a_scales, rank * kM, kM, s.a_scales[step]);
      lay_scales(b_scales, 0, static_cast<size_t>(n), s.b_scales[step][0]);
    }
  }

  // Of `steps` products one after another: the model's sum of row m and column n.
  uint32_t sum(int m, int column, int steps) const {
    uint32_t sum = 0;
    const bool is_fast = ptx::emulated::sums_are_fast();
    for (int step = 0; step < steps; ++step) {
      int groups[4];
      uint8_t sa[4], sb[4];
      for (int j = 0; j < 4; ++j) {
        groups[j] = 0;
        for (int k = step * 64 + j * 16; k < step * 64 + j * 16 + 16; ++k) {
          const auto code = [&](const std::vector<uint8_t>& rows, int row) {
            return ptx::emulated::halves_of_e2m1(
                static_cast<uint32_t>(rows[static_cast<size_t>(row * 128 + k / 2)] >> k % 2 * 4 & 15));
          };
          groups[j] += code(a, m) * code(b, column);
        }
        sa[j] = a_scales[static_cast<size_t>(m * 16 + step * 4 + j)];
        sb[j] = b_scales[static_cast<size_t>(column * 16 + step * 4 + j)];
      }
      sum = ptx::emulated::tcgen05_sum(is_fast, sum, groups, sa, sb);
    }
    return sum;
  }
};

class OperandsTest : public RandomTest {
 protected:
  Operands random_operands(int n, int num_blocks = 1) {
    const auto bytes = [&](int count, uint64_t below) {
      std::vector<uint8_t> made(static_cast<size_t>(count));
      for (uint8_t& byte : made) byte = static_cast<uint8_t>(rng_.below(below));
      return made;
    };
    const int m = kM * num_blocks;
    return {n, num_blocks, bytes(m * 128, 256), bytes(n * 128, 256), bytes(m * 16, 0x7F), bytes(n * 16, 0x7F)};
  }
};

template <int kBlocks = 1>
void sync_blocks() {
  if constexpr (kBlocks == 1) {
    __syncthreads();
  } else {
    ptx::sync_cluster();
  }
}

template <int kBlocks = 1>
void allocate(int columns = 512) {
  Shared& s = shared();
  sync_blocks<kBlocks>();  // all are there, and lanes of a warp together
  if (thread() < 32) tcgen05::alloc<kBlocks>(&s.memory, columns);
  if (thread() == 0) s.done.init(1), s.never.init(1);
  sync_blocks<kBlocks>();
}
template <int kBlocks = 1>
void release(int columns = 512) {
  sync_blocks<kBlocks>();
  if (thread() < 32) tcgen05::dealloc<kBlocks>(shared().memory, columns);
}

template <int kBlocks = 1>
void copy_scales(int step, int n) {
  Shared& s = shared();
  const auto at = static_cast<uint32_t>(s.memory);
  tcgen05::cp_scales<kBlocks>(at + kScalesOfA + 4 * (step % 2),
                              scales_descriptor(ptx::shared_address(s.a_scales[step])));
  for (int half = 0; half < (n + 127) / 128; ++half) {
    tcgen05::cp_scales<kBlocks>(at + kScalesOfB + 8 * (step % 2) + 4 * half,
                                scales_descriptor(ptx::shared_address(s.b_scales[step][half])));
  }
}

// What a product takes; a test changes a part of it.
struct Issue {
  uint32_t d, a_scales, b_scales, instruction;
  uint64_t a, b;
  bool adds;
};
template <int kBlocks = 1>
Issue issue_of(int step, int n) {
  Shared& s = shared();
  return {s.memory,
          s.memory + kScalesOfA + 4 * (step % 2),
          s.memory + kScalesOfB + 8 * (step % 2),
          nvfp4_instruction(kM * kBlocks, n),
          advance_descriptor(codes_descriptor(ptx::shared_address(s.a)), 32 * step),
          advance_descriptor(codes_descriptor(ptx::shared_address(s.b)), 32 * step),
          step > 0};
}
template <int kBlocks = 1>
void multiply(const Issue& i) {
  tcgen05::mma_nvfp4<kBlocks>(i.d, i.a, i.b, i.instruction, i.a_scales, i.b_scales, i.adds);
}

inline uint32_t row_address() {
  return shared().memory + (static_cast<uint32_t>(thread() / 32 % 4 * 32) << 16);
}

// By the first 128 threads: `n` sums of this thread's row.
inline void load_row(int n, uint32_t* to) {
  __syncwarp();
  for (int first = 0; first < n; first += 8) {
    uint32_t r[8];
    tcgen05::ld(r, row_address() + static_cast<uint32_t>(first));
    tcgen05::wait_ld(r);
    for (int i = 0; i < 8; ++i) to[first + i] = r[i];
  }
}

}  // namespace tessera::testing::tcgen05_blocks
