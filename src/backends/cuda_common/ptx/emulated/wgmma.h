// SPDX-License-Identifier: Apache-2.0
#pragma once
// What ptx/wgmma.cuh computes on the emulated GPU: at once or as late as waiting allows, by chance, so that whoever
// touches registers or shared memory of products under way is found out. Sums are rounded as ptx/emulated/mma.h says.
#include <array>
#include <cstdint>
#include <memory>
#include <utility>

#include "backends/cuda_common/ptx/emulated/mma.h"
#include "device/cuda/emulated/block.h"

namespace tessera::backends::cuda_common::ptx::emulated {

// Where 16 bits of a swizzled operand lie: its swizzle is one of address bits, 16-byte place ^ row of the group of 8.
inline double swizzled_value(const char* at) {
  const auto address = reinterpret_cast<uintptr_t>(at);
  return bf16_half(*reinterpret_cast<const uint16_t*>(address ^ (address >> 7 & 7) << 4), 0);
}

// A thread's part of a product: two rows by all columns.
struct WgmmaPart final : device::emulated::LateWork {
  float* d;
  int columns;
  const char* a = nullptr;  // null: `rows` has them
  int a_stride = 0;
  std::array<std::array<double, 16>, 2> rows;
  const char* b;
  int stride;
  bool has_k_rows = false;  // of B, else columns
  bool adds;

  void make() const override {
    const int lane = device::emulated::current.lane(), warp = device::emulated::current.index() / 32 % 4;
    const int t = lane % 4;
    auto held = rows;
    for (int i = 0; a != nullptr && i < 32; ++i) {
      const int row = 16 * warp + i / 16 * 8 + lane / 4, k = i % 16;
      held[static_cast<size_t>(i / 16)][static_cast<size_t>(k)] =
          swizzled_value(a + row / 8 * a_stride + row % 8 * 128 + 2 * k);
    }
    for (int i = 0; i < columns / 2; ++i) {
      const int column = i / 4 * 8 + 2 * t + i % 2;
      double sum = adds ? static_cast<double>(d[i]) : 0.0;
      for (int k = 0; k < 16; ++k)
        sum += held[static_cast<size_t>(i % 4 / 2)][static_cast<size_t>(k)] * value(k, column);
      d[i] = static_cast<float>(sum);
    }
  }

 private:
  double value(int k, int column) const {
    const int row = has_k_rows ? k : column, in_row = has_k_rows ? column : k;
    return swizzled_value(b + row / 8 * stride + row % 8 * 128 + 2 * in_row);
  }
};

struct WgmmaRows {
  const uint32_t* a;
  std::array<std::array<double, 16>, 2>* rows;
};

inline void wgmma_bf16(float* d, int columns, const uint32_t (&a)[4], const char* b, int stride, bool adds) {
  using device::emulated::kWarp;
  auto part = std::make_unique<WgmmaPart>();
  part->d = d, part->columns = columns, part->b = b, part->stride = stride, part->adds = adds;
  WgmmaRows mine{a, &part->rows};
  device::emulated::collective(device::emulated::Site::current(), ~0u, &mine, [](void* const(&lanes)[kWarp]) {
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int from = lane / 4 * 4; from < lane / 4 * 4 + 4; ++from) {
        const uint32_t* words = static_cast<WgmmaRows*>(lanes[from])->a;
        for (int i = 0; i < 4; ++i) {
          for (int half = 0; half < 2; ++half) {
            const int k = 2 * (from % 4) + i / 2 * 8 + half;
            (*static_cast<WgmmaRows*>(lanes[lane])->rows)[static_cast<size_t>(i % 2)][static_cast<size_t>(k)] =
                bf16_half(words[i], half);
          }
        }
      }
    }
  });
  device::emulated::work_late(device::emulated::LateKind::kProducts, std::move(part));
}

inline void wgmma_bf16_shared(float* d, const char* a, int a_stride, const char* b, int stride, bool adds,
                              bool has_k_rows = false) {
  auto part = std::make_unique<WgmmaPart>();
  part->d = d, part->columns = 64, part->a = a, part->a_stride = a_stride, part->has_k_rows = has_k_rows;
  part->b = b, part->stride = stride, part->adds = adds;
  __syncwarp();
  device::emulated::work_late(device::emulated::LateKind::kProducts, std::move(part));
}

inline void commit_products() {
  device::emulated::commit_late(device::emulated::LateKind::kProducts);
}
// A warp waits as one (.sync.aligned): no lane goes on before the others' parts are there.
inline void wait_for_products(int newest) {
  device::emulated::wait_for_late(device::emulated::LateKind::kProducts, newest);
  __syncwarp();
}

}  // namespace tessera::backends::cuda_common::ptx::emulated
