// SPDX-License-Identifier: Apache-2.0
#include "backends/gpu_instructions.h"

#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/ptx/conversions.cuh"
#include "backends/cuda_common/ptx/emulated/block_scaled_shuffles.cuh"
#include "backends/cuda_common/ptx/mma.cuh"
#ifdef TESSERA_CUDA_EMULATED
#include "backends/cuda_common/ptx/block_scaled_mma.cuh"
#endif

namespace tessera::testing {

namespace {

namespace ptx = backends::cuda_common::ptx;

__device__ uint32_t bits_of(float value) {
  return __builtin_bit_cast(uint32_t, value);
}

__device__ uint32_t result_of(Instruction instruction, uint32_t input) {
  const float value = __builtin_bit_cast(float, input), gate = __builtin_bit_cast(float, input << 16);
  const uint32_t swapped = input >> 16 | input << 16;
  switch (instruction) {
    case Instruction::kE4m3:
      return ptx::e4m3_code(value);
    case Instruction::kBf16:
      return ptx::round_to_bf16x2(value, -value);
    case Instruction::kBf16Of:
      return numeric::bf16_from_float(value);
    case Instruction::kLargerBf16:
      return ptx::larger_bf16x2(input, swapped);
    case Instruction::kMultiplyBf16:
      return ptx::multiply_bf16x2(input, swapped);
    case Instruction::kPositivePart:
      return bits_of(ptx::positive_part(value));
    case Instruction::kSignedBytes:
      return ptx::signed_halves<0>(input, swapped) + ptx::signed_halves<1>(input, swapped) * 3 +
             ptx::signed_halves<2>(input, swapped) * 5 + ptx::signed_halves<3>(input, swapped) * 7;
    case Instruction::kSignedHalves:
      return ptx::signed_halves<0>(input) + ptx::signed_halves<2>(swapped) * 3;
    case Instruction::kReciprocal:
      return bits_of(ptx::reciprocal_estimate(value));
    case Instruction::kDivision: {
      const DivisionOperands operands = division_operands(input);
      return bits_of(ptx::divide_usual(operands.a, operands.b));
    }
    case Instruction::kE2m1:
      return numeric::e2m1_from_float(value);
    case Instruction::kExp:
      return bits_of(expf(value));
    case Instruction::kExp2:
      return bits_of(exp2f(value));
    case Instruction::kGateSum:
      return bits_of(1 + expf(-gate));
    case Instruction::kGateQuotient:
      return bits_of(ptx::divide_usual(gate, 1 + expf(-gate)));
  }
  return 0;
}

constexpr int kThreads = 128, kEach = 32;

__global__ void __launch_bounds__(kThreads)
    compute(Instruction instruction, uint32_t first, uint32_t step, int64_t count, uint32_t* results) {
  const int64_t begin = int64_t{blockIdx.x} * kThreads * kEach + threadIdx.x;
  for (int64_t i = begin; i < min(count, begin + kThreads * kEach); i += kThreads) {
    results[i] = result_of(instruction, first + static_cast<uint32_t>(i) * step);
  }
}

template <int kAThread, int kBThread>
__global__ void multiply(ProductRegisters* registers, bool by_shuffles) {
  ProductRegisters& r = *registers;
  const int lane = static_cast<int>(threadIdx.x);
#ifdef TESSERA_CUDA_EMULATED
  if (!by_shuffles) {
    const uint32_t(&a)[4] = r.a[lane];
    ptx::mma_nvfp4<kAThread, kBThread>(r.sums[lane], uint4{a[0], a[1], a[2], a[3]}, r.b[lane][0], r.b[lane][1],
                                       r.a_scales[lane], r.b_scales[lane]);
    return;
  }
#endif
  ptx::emulated::mma_nvfp4_by_shuffles(r.sums[lane], r.a[lane], r.b[lane], r.a_scales[lane], r.b_scales[lane], kAThread,
                                       kBThread);
}

}  // namespace

int multiprocessors() {
  return backends::cuda_common::multiprocessors();
}

void run_instruction(Instruction instruction, device::Queue& queue, uint32_t first, uint32_t step, int64_t count,
                     uint32_t* results) {
  backends::cuda_common::launch("an instruction", queue, compute,
                                backends::cuda_common::grid_for(count, kThreads * kEach), kThreads, 0, instruction,
                                first, step, count, results);
}

void run_product(int a_thread, int b_thread, bool by_shuffles, device::Queue& queue, ProductRegisters* registers) {
  using Kernel = void (*)(ProductRegisters*, bool);
  constexpr Kernel kKernels[2][4] = {{multiply<0, 0>, multiply<0, 1>, multiply<0, 2>, multiply<0, 3>},
                                     {multiply<1, 0>, multiply<1, 1>, multiply<1, 2>, multiply<1, 3>}};
  backends::cuda_common::launch("a product", queue, kKernels[a_thread][b_thread], dim3(1), 32, 0, registers,
                                by_shuffles);
}

}  // namespace tessera::testing
