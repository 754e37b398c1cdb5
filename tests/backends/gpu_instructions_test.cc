// SPDX-License-Identifier: Apache-2.0
// Instructions that kernels use and that the emulated GPU replaces by numeric/ and the host's arithmetic: a GPU has to
// give the same results. On hardware of every input, on the emulated GPU (whose results they are) of some.
#include "backends/gpu_instructions.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <mutex>
#include <vector>

#include "device/buffer.h"
#include "numeric/bf16.h"
#include "numeric/e2m1.h"
#include "numeric/e4m3.h"
#include "testing/gpu_stage.h"

namespace tessera {
namespace {

using testing::Instruction;

float float_of(uint32_t bits) {
  return std::bit_cast<float>(bits);
}
bool is_bf16_nan(uint32_t half) {
  return (half & 0x7FFF) > 0x7F80;
}
// Equal, or both NaN: which NaN an instruction gives is nobody's business.
bool same_bf16(uint32_t found, uint32_t expected) {
  return found == expected || (is_bf16_nan(found) && is_bf16_nan(expected));
}
bool same_bf16x2(uint32_t found, uint32_t expected) {
  return same_bf16(found & 0xFFFF, expected & 0xFFFF) && same_bf16(found >> 16, expected >> 16);
}
bool same_float(uint32_t found, float expected) {
  return found == std::bit_cast<uint32_t>(expected) || (std::isnan(float_of(found)) && std::isnan(expected));
}
// Distance from the exact value in units of the last place of an FP32 of that size, 0 where the nearest was found.
double ulps(float found, double exact) {
  if (static_cast<double>(found) == exact || found == static_cast<float>(exact)) return 0;
  if (std::isnan(found) || std::isnan(exact)) return std::isnan(found) && std::isnan(exact) ? 0 : HUGE_VAL;
  int exponent = 0;
  std::frexp(exact, &exponent);
  const double found_as_double = std::isinf(found) ? std::copysign(0x1p128, found) : static_cast<double>(found);
  return std::fabs(found_as_double - exact) / std::ldexp(1.0, std::max(exponent, -125) - 24);
}

class GpuInstructions : public ::testing::Test {
 protected:
  // An error of 0 where the result is right; more than `bound` fails.
  using ErrorOf = std::function<double(uint32_t input, uint32_t result)>;

  void SetUp() override {
    std::string why_not;
    if (!testing::find_test_gpu(why_not).has_value()) GTEST_SKIP() << why_not;
  }
  void check(const char* name, Instruction instruction, uint32_t num_inputs_less_one, double bound,
             const ErrorOf& error_of);
  // results of ascending inputs
  std::vector<uint32_t> results_of(Instruction instruction, int64_t count) {
    device::Executor& gpu = testing::gpu_stage_memory().executor();
    const device::Buffer there(static_cast<size_t>(count) * 4, gpu.memory());
    std::vector<uint32_t> found(static_cast<size_t>(count));
    testing::run_instruction(instruction, gpu.queue(), 0, 1, count, there.as<uint32_t>());
    gpu.memory().download(found.data(), there.data(), there.size());
    return found;
  }
};

void GpuInstructions::check(const char* name, Instruction instruction, uint32_t num_inputs_less_one, double bound,
                            const ErrorOf& error_of) {
  // The step visits all exponents and signs.
  const uint32_t step = testing::kGpuIsEmulated ? 65521 : 1;
  const int64_t count = int64_t{num_inputs_less_one} / step + 1, most = int64_t{1} << 26;
  device::Executor& gpu = testing::gpu_stage_memory().executor();
  const size_t held = static_cast<size_t>(std::min(count, most));
  const device::Buffer there(held * 4, gpu.memory()), arrived(held * 4, gpu.staging());
  const uint32_t* found = arrived.as<uint32_t>();
  device::Queue host;
  std::mutex mutex;
  int64_t num_off = 0;
  double worst = 0;
  uint32_t worst_input = 0, worst_result = 0;
  for (int64_t begin = 0; begin < count; begin += most) {
    const int64_t here = std::min(most, count - begin);
    const uint32_t first = static_cast<uint32_t>(begin) * step;
    testing::run_instruction(instruction, gpu.queue(), first, step, here, there.as<uint32_t>());
    gpu.memory().download(arrived.data(), there.data(), static_cast<size_t>(here) * 4);
    host.parallel_for(here, 1 << 16, [&](int64_t from, int64_t to) {
      int64_t off = 0;
      double largest = 0;
      int64_t place = from;
      for (int64_t i = from; i < to; ++i) {
        const double error = error_of(first + static_cast<uint32_t>(i) * step, found[i]);
        off += error != 0;
        if (error > largest) largest = error, place = i;
      }
      const std::lock_guard lock(mutex);
      num_off += off;
      if (largest > worst) {
        worst = largest;
        worst_input = first + static_cast<uint32_t>(place) * step, worst_result = found[place];
      }
    });
  }
  std::printf("%s: %lld inputs, %lld not the nearest, worst error %.4g (input %08x, result %08x)\n", name,
              static_cast<long long>(count), static_cast<long long>(num_off), worst, worst_input, worst_result);
  const std::string key = name;
  RecordProperty(key + "_inputs", std::to_string(count));
  RecordProperty(key + "_not_nearest", std::to_string(num_off));
  RecordProperty(key + "_worst_error", std::to_string(worst));
  EXPECT_LE(worst, bound) << "input " << std::hex << worst_input << ", result " << worst_result;
}

constexpr uint32_t kAll = 0xFFFFFFFF;

TEST_F(GpuInstructions, E4m3) {
  check("e4m3", Instruction::kE4m3, kAll, 0,
        [](uint32_t input, uint32_t result) { return result == numeric::e4m3_from_float(float_of(input)) ? 0 : 1; });
}

TEST_F(GpuInstructions, E2m1) {
  check("e2m1", Instruction::kE2m1, kAll, 0,
        [](uint32_t input, uint32_t result) { return result == numeric::e2m1_from_float(float_of(input)) ? 0 : 1; });
}

TEST_F(GpuInstructions, Bf16) {
  check("bf16x2", Instruction::kBf16, kAll, 0, [](uint32_t input, uint32_t result) {
    const uint32_t lower = numeric::bf16_from_float(float_of(input)),
                   upper = numeric::bf16_from_float(-float_of(input));
    return same_bf16x2(result, lower | upper << 16) ? 0 : 1;
  });
}

TEST_F(GpuInstructions, Bf16Of) {
  check("bf16", Instruction::kBf16Of, kAll, 0, [](uint32_t input, uint32_t result) {
    return same_bf16(result, numeric::bf16_from_float(float_of(input))) ? 0 : 1;
  });
}

// Of zeros either is the larger one.
TEST_F(GpuInstructions, LargerBf16) {
  check("larger_bf16x2", Instruction::kLargerBf16, kAll, 0, [](uint32_t input, uint32_t result) {
    const float a = float_of(input << 16), b = float_of(input & 0xFFFF0000);
    const auto is_right = [&](uint32_t half) {
      const float found = float_of(half << 16);
      if (std::isnan(a) || std::isnan(b)) return std::isnan(found);
      return found == (a > b ? a : b);
    };
    return is_right(result & 0xFFFF) && is_right(result >> 16) ? 0 : 1;
  });
}

TEST_F(GpuInstructions, MultiplyBf16) {
  check("multiply_bf16x2", Instruction::kMultiplyBf16, kAll, 0, [](uint32_t input, uint32_t result) {
    const double product =
        static_cast<double>(float_of(input << 16)) * static_cast<double>(float_of(input & 0xFFFF0000));
    const uint32_t half = numeric::bf16_from_float(static_cast<float>(product));
    return same_bf16x2(result, half | half << 16) ? 0 : 1;
  });
}

TEST_F(GpuInstructions, PositivePart) {
  check("positive_part", Instruction::kPositivePart, kAll, 0, [](uint32_t input, uint32_t result) {
    const float value = float_of(input);
    return same_float(result, value <= 0 ? 0.0f : value) ? 0 : 1;
  });
}

TEST_F(GpuInstructions, SignedHalves) {
  check("signed_halves", Instruction::kSignedHalves, kAll, 0, [](uint32_t input, uint32_t result) {
    const auto half = [&](int byte) { return static_cast<uint16_t>(static_cast<int8_t>(input >> 8 * byte)); };
    const uint32_t halves = half(0) | static_cast<uint32_t>(half(1)) << 16;
    return result == halves * 4 ? 0 : 1;
  });
}

TEST_F(GpuInstructions, SignedBytesOfTwoWords) {
  check("signed_bytes", Instruction::kSignedBytes, kAll, 0, [](uint32_t input, uint32_t result) {
    const uint32_t swapped = input >> 16 | input << 16;
    const auto half = [](uint32_t word, int byte) {
      return uint32_t{static_cast<uint16_t>(static_cast<int8_t>(word >> 8 * byte))};
    };
    uint32_t expected = 0;
    for (uint32_t i = 0; i < 4; ++i) {
      const int byte = static_cast<int>(i);
      expected += (half(input, byte) | half(swapped, byte) << 16) * (2 * i + 1);
    }
    return result == expected ? 0 : 1;
  });
}

TEST_F(GpuInstructions, DivisionOfUsualNumbersIsIeees) {
  check("division", Instruction::kDivision, kAll, 0, [](uint32_t input, uint32_t result) {
    const testing::DivisionOperands operands = testing::division_operands(input);
    const float expected = operands.a / operands.b;
    return std::fabs(expected) < 0x1p-120f || same_float(result, expected) ? 0 : 1;
  });
}

// Within what the PTX ISA says; normal numbers whose reciprocals are normal.
TEST_F(GpuInstructions, ReciprocalEstimate) {
  check("reciprocal", Instruction::kReciprocal, kAll, 1, [](uint32_t input, uint32_t result) {
    const float value = float_of(input);
    const double exact = 1 / static_cast<double>(value);
    if (!std::isnormal(value) || std::fabs(exact) < 0x1p-126) return 0.0;
    return ulps(float_of(result), exact);
  });
}

// CUDA C++ Programming Guide, "Standard Functions": at most 2 from the nearest number, so 2.5 from the exact one.
TEST_F(GpuInstructions, Exponentials) {
  check("expf", Instruction::kExp, kAll, 2.5, [](uint32_t input, uint32_t result) {
    return ulps(float_of(result), std::exp(static_cast<double>(float_of(input))));
  });
  check("exp2f", Instruction::kExp2, kAll, 2.5, [](uint32_t input, uint32_t result) {
    return ulps(float_of(result), std::exp2(static_cast<double>(float_of(input))));
  });
}

// SwiGLU of all gates: the quotient has the bits of a division by the same sum. Bounds: cuda_common/swiglu_values.cuh.
TEST_F(GpuInstructions, QuotientsOfEveryGateAreIeees) {
  constexpr int64_t kGates = 1 << 16;
  const std::vector<uint32_t> sums = results_of(Instruction::kGateSum, kGates),
                              quotients = results_of(Instruction::kGateQuotient, kGates);
  int num_usual = 0, num_other_sums = 0;
  for (size_t i = 0; i < kGates; ++i) {
    const float gate = float_of(static_cast<uint32_t>(i) << 16);
    if (!(gate > -80 && gate < 0x1p60f)) continue;
    ++num_usual;
    num_other_sums += float_of(sums[i]) != 1 + std::exp(-gate);
    EXPECT_TRUE(same_float(quotients[i], gate / float_of(sums[i]))) << "gate " << gate;
  }
  std::printf("gates: %d, sums other than the host's: %d\n", num_usual, num_other_sums);
  RecordProperty("gates", num_usual);
  RecordProperty("sums_other_than_the_hosts", num_other_sums);
  EXPECT_GT(num_usual, 40000);
}

}  // namespace
}  // namespace tessera
