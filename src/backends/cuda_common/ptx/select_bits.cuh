// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bits of two words. Source: PTX ISA, "lop3".
#include <cstdint>

namespace tessera::backends::cuda_common::ptx {

// Of `a` where the mask has ones, of `b` elsewhere. One instruction, which the compiler can't take apart: left to
// itself it moves shifts and masks of the result before it, and makes up to three of them.
template <uint32_t kMask>
__device__ inline uint32_t select_bits(uint32_t a, uint32_t b) {
#ifdef TESSERA_CUDA_EMULATED
  return (a & kMask) | (b & ~kMask);
#else
  uint32_t bits;
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(bits) : "r"(a), "r"(b), "n"(kMask));
  return bits;
#endif
}

}  // namespace tessera::backends::cuda_common::ptx
