// SPDX-License-Identifier: Apache-2.0
#pragma once
// Products of a warpgroup (sm_90a): 128 threads multiply 64 rows of A, which they hold, by N columns of B, which lie in
// shared memory, while they go on. Source: PTX ISA, "wgmma.mma_async", "wgmma.fence", "wgmma.commit_group",
// "wgmma.wait_group", "Matrix-descriptor format", "Strides"; "fence.proxy.async"; "movmatrix". Measured on an H200: a
// sum has the bits that mma.sync m16n8k16 gives for the same sixteen products (docs/performance/hopper.md).
#include <cstdint>

#ifdef TESSERA_CUDA_EMULATED
#include "backends/cuda_common/ptx/emulated/wgmma.h"
#endif

namespace tessera::backends::cuda_common::ptx {

// B of 16 k by N columns of BF16 in shared memory: groups of 8 columns `stride` bytes apart; a column is a row of 128
// bytes (64 k, of which 16 from `at` on are meant), and the 16 bytes at place c of row r of a group lie at c ^ r
// (128-byte swizzle; groups are aligned to 1,024 bytes).
struct SharedOperand {
#ifdef TESSERA_CUDA_EMULATED
  const char* at;
  int stride;
  __device__ static SharedOperand of(const void* at, int stride) {
    return {static_cast<const char*>(at), stride};
  }
  // `bytes` further along the rows.
  __device__ SharedOperand operator+(int bytes) const {
    return {at + bytes, stride};
  }
#else
  uint64_t bits;
  __device__ static SharedOperand of(const void* at, int stride) {
    constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kNoLeadingStride = uint64_t{1} << 16;
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(at));
    return {(address & 0x3FFFF) >> 4 | kNoLeadingStride | static_cast<uint64_t>(stride >> 4) << 32 | kSwizzle128};
  }
  __device__ SharedOperand operator+(int bytes) const {
    return {bits + static_cast<uint64_t>(bytes >> 4)};
  }
#endif
};

// Before the first product of several: what the threads wrote to its registers is there.
__device__ inline void begin_products() {
#ifndef TESSERA_CUDA_EMULATED
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
// Ends a group of products.
__device__ inline void commit_products() {
#ifdef TESSERA_CUDA_EMULATED
  emulated::commit_products();
#else
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits until at most kNewest groups are under way. Their registers may not be touched before.
template <int kNewest>
__device__ inline void wait_for_products() {
#ifdef TESSERA_CUDA_EMULATED
  emulated::wait_for_products(kNewest);
#else
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNewest) : "memory");
#endif
}

// d = A B, `adds`: d += A B, for kColumns columns. Warp w of the warpgroup holds rows [16 w, 16 w + 16) as mma_bf16's A
// (mma.cuh), and of the result d[4 j + i] is what mma_bf16 calls sums[i] of columns [8 j, 8 j + 8).
#ifdef TESSERA_CUDA_EMULATED
template <int kColumns>
__device__ inline void wgmma_bf16(float (&d)[kColumns / 2], const uint32_t (&a)[4], const SharedOperand& b, bool adds) {
  emulated::wgmma_bf16(d, kColumns, a, b.at, b.stride, adds);
}
#else
template <int kColumns>
__device__ void wgmma_bf16(float (&d)[kColumns / 2], const uint32_t (&a)[4], const SharedOperand& b, bool adds);

template <>
__device__ inline void wgmma_bf16<32>(float (&d)[16], const uint32_t (&a)[4], const SharedOperand& b, bool adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, {%16, %17, %18, %19}, %20, adds, 1, 1, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(static_cast<int>(adds)));
}

template <>
__device__ inline void wgmma_bf16<64>(float (&d)[32], const uint32_t (&a)[4], const SharedOperand& b, bool adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, adds, 1, 1, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(static_cast<int>(adds)));
}

template <>
__device__ inline void wgmma_bf16<96>(float (&d)[48], const uint32_t (&a)[4], const SharedOperand& b, bool adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %53, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
      "}, {%48, %49, %50, %51}, %52, adds, 1, 1, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(static_cast<int>(adds)));
}

template <>
__device__ inline void wgmma_bf16<128>(float (&d)[64], const uint32_t (&a)[4], const SharedOperand& b, bool adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, adds, 1, 1, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(static_cast<int>(adds)));
}
#endif

// d = A B, `adds`: d += A B, for 64 rows of A that lie in shared memory as B's columns do.
__device__ inline void wgmma_bf16_shared(float (&d)[32], const SharedOperand& a, const SharedOperand& b, bool adds) {
#ifdef TESSERA_CUDA_EMULATED
  emulated::wgmma_bf16_shared(d, a.at, a.stride, b.at, b.stride, adds);
#else
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, adds, 1, 1, 0, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a.bits), "l"(b.bits), "r"(static_cast<int>(adds)));
#endif
}

// The same for 64 columns of a B whose k are rows: 16 rows of 128 bytes from `b` on, which begins a group of 8, in
// groups `stride` bytes apart, swizzled likewise.
__device__ inline void wgmma_bf16_shared_rows(float (&d)[32], const SharedOperand& a, const SharedOperand& b,
                                              bool adds) {
#ifdef TESSERA_CUDA_EMULATED
  emulated::wgmma_bf16_shared(d, a.at, a.stride, b.at, b.stride, adds, true);
#else
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, adds, 1, 1, 0, 1;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a.bits), "l"(b.bits), "r"(static_cast<int>(adds)));
#endif
}

// What this thread has written to shared memory, or copied there and waited for, is there for products that begin
// after a barrier.
__device__ inline void show_to_products() {
#ifndef TESSERA_CUDA_EMULATED
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Transposes 8 by 8 values of 16 bits: lane (g, t) gives row g, columns 2 t and 2 t + 1 (in the lower half the first),
// and takes row 2 t and 2 t + 1 of column g. All of the warp takes part.
__device__ inline uint32_t transpose_8x8(uint32_t pair) {
#ifdef TESSERA_CUDA_EMULATED
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const uint32_t first = __shfl_sync(~0u, pair, 8 * t + g / 2), second = __shfl_sync(~0u, pair, 8 * t + 4 + g / 2);
  return (first >> (g % 2 * 16) & 0xFFFF) | (second >> (g % 2 * 16) & 0xFFFF) << 16;
#else
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
#endif
}

}  // namespace tessera::backends::cuda_common::ptx
