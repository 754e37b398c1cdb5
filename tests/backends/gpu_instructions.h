// SPDX-License-Identifier: Apache-2.0
#pragma once
// Single instructions of ptx/ on the test's GPU, the model of Blackwell's block-scaled product by shuffles, and how
// many multiprocessors the GPU has.
#include <cstdint>

#include "base/host_device.h"
#include "device/queue.h"

namespace tessera::testing {

int multiprocessors();

// What of each 32-bit input is computed; results are 32 bits.
enum class Instruction {
  kE4m3,          // ptx::e4m3_code of an FP32
  kBf16,          // ptx::round_to_bf16x2 of an FP32 and its opposite
  kBf16Of,        // numeric::bf16_from_float of an FP32, compiled for the GPU
  kLargerBf16,    // ptx::larger_bf16x2 of (lower, upper half) and (upper, lower)
  kMultiplyBf16,  // ptx::multiply_bf16x2 of the same
  kPositivePart,  // ptx::positive_part of an FP32
  kSignedBytes,   // 1, 3, 5 and 7 times ptx::signed_halves<0 to 3> of a word and of its halves exchanged
  kSignedHalves,  // ptx::signed_halves<0>, and three times its <2> of the halves exchanged
  kReciprocal,    // ptx::reciprocal_estimate of an FP32
  kDivision,      // ptx::divide_usual of division_operands()
  kE2m1,          // numeric::e2m1_from_float of an FP32, compiled for the GPU
  kExp,           // expf of an FP32
  kExp2,          // exp2f of an FP32
  kGateSum,       // of the lower half, a BF16 gate: 1 + expf(-gate)
  kGateQuotient,  // and ptx::divide_usual of the gate by that
};

struct DivisionOperands {
  float a, b;
};
// Every mantissa of b with 512 exponents and dividends: b from 2^-22 to 2^120, |a| from 2^-100 to 2^60.
TESSERA_HOST_DEVICE constexpr DivisionOperands division_operands(uint32_t input) {
  const uint32_t mixed = (input ^ input >> 15) * 0x9E3779B1u, other = (mixed ^ mixed >> 13) * 0x85EBCA6Bu;
  const uint32_t b_exponent = 127 - 22 + (other >> 8) % 142, a_exponent = 127 - 100 + (other >> 20) % 160;
  const uint32_t a = (other & 1) << 31 | a_exponent << 23 | (mixed >> 9);
  return {__builtin_bit_cast(float, a), __builtin_bit_cast(float, b_exponent << 23 | (input & 0x7FFFFF))};
}

// results[i] = of input first + i * step (mod 2^32), for `count`; `results` is memory of the queue's GPU.
void run_instruction(Instruction instruction, device::Queue& queue, uint32_t first, uint32_t step, int64_t count,
                     uint32_t* results);

// A warp's registers of ptx/block_scaled_mma.cuh's product.
struct ProductRegisters {
  uint32_t a[32][4], b[32][2], a_scales[32], b_scales[32];
  float sums[32][4];
};
// The product with such scales' threads, by the model in shuffles; or by what mma_nvfp4 is, on the emulated GPU alone.
// `registers` is memory of the queue's GPU.
void run_product(int a_thread, int b_thread, bool by_shuffles, device::Queue& queue, ProductRegisters* registers);

}  // namespace tessera::testing
