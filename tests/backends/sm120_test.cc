// SPDX-License-Identifier: Apache-2.0
// Block-scaled products and what is made of them: registers and lanes are those of the ISA's tables, a step's sum is
// what the hardware was seen to compute, and the backend's linear maps and experts have, at every number of tokens, the
// bits of plain loops over that sum.
#include "backends/sm120/scaled_units.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <set>

#include "backends/cuda_common/ptx/emulated/product_sums.h"
#include "backends/gpu_instructions.h"
#include "backends/layout_round_trip.h"
#include "backends/scaled_experts.h"
#include "backends/sm120/sum_plans.h"
#include "ops/linear/linear.h"
#include "ops/moe/moe.h"
#include "ops/packed_weight.h"
#include "testing/op_harness.h"

#ifdef TESSERA_CUDA_EMULATED
#include "backends/sums_mode.h"
#endif

namespace tessera {
namespace {

using backends::cuda_common::ptx::emulated::block_scaled_sum, backends::cuda_common::ptx::emulated::mma_sync_sum,
    backends::cuda_common::ptx::emulated::sums_are_fast;
using backends::sm120::InputUnit, backends::sm120::kStepColumns, backends::sm120::kUnitColumns,
    backends::sm120::WeightUnit;
using ops::InputMode, ops::WeightFormat;
using testing::input_row, testing::Routing, testing::ScaledRow, testing::weight_row;

// One step by its description, in other arithmetic: doubles, which hold every number that occurs, and rounding to
// nearest corrected to rounding toward zero.
float plain_step(const int (&dots)[4], uint32_t a_scales, uint32_t b_scales, float sum) {
  struct Parts {
    double significand;
    int exponent;
  };
  const auto parts_of = [](double value, int least) {
    int exponent = 0;
    const double fraction = std::frexp(value, &exponent);
    if (value == 0) return Parts{0, -126};
    const int kept = std::max(exponent - 1, least);
    return Parts{fraction * 2 * std::ldexp(1.0, exponent - 1 - kept), kept};
  };
  std::vector<Parts> terms = {parts_of(static_cast<double>(sum), -126)};
  for (int j = 0; j < 4; ++j) {
    const auto scale = [&](uint32_t word) {
      return static_cast<double>(numeric::e4m3_to_float(static_cast<uint8_t>(word >> 8 * j & 0x7F)));
    };
    const Parts a = parts_of(scale(a_scales), -6), b = parts_of(scale(b_scales), -6);
    terms.push_back({dots[j] / 4.0 * a.significand * b.significand, a.exponent + b.exponent});
    if (std::isnan(scale(a_scales) * scale(b_scales)) || std::isnan(sum)) return std::bit_cast<float>(0x7FFFFFFFu);
  }
  int largest = terms[0].exponent;
  for (const Parts& term : terms) largest = std::max(largest, term.exponent);
  double total = 0;
  for (const Parts& term : terms) total += std::trunc(std::ldexp(term.significand, 35 + term.exponent - largest));
  const double exact = std::ldexp(total, largest - 35);
  const float nearest = static_cast<float>(exact);
  return std::fabs(static_cast<double>(nearest)) > std::fabs(exact) ? std::nextafter(nearest, 0.0f) : nearest;
}

class BlockScaledTest : public testing::RandomTest {
 protected:
#ifdef TESSERA_CUDA_EMULATED
  BlockScaledTest() {
    device::emulated::set_compute_capability(12, 0);
  }
  ~BlockScaledTest() override {
    device::emulated::set_compute_capability(9, 0);
  }
#endif
  uint32_t word() {
    return static_cast<uint32_t>(rng_.next_u64());
  }
  int below(int count) {
    return static_cast<int>(rng_.below(static_cast<uint64_t>(count)));
  }
  // Four scales without NaN, of all sizes or of one.
  uint32_t scales() {
    uint32_t bytes = 0;
    const bool is_small = below(4) == 0;
    for (int j = 0; j < 4; ++j) bytes |= static_cast<uint32_t>(below(is_small ? 9 : 127)) << 8 * j;
    return bytes;
  }
};

TEST_F(BlockScaledTest, AStepIsCutAsDescribed) {
  for (int run = 0; run < 200000; ++run) {
    int dots[4];
    for (int& dot : dots) dot = below(5) == 0 ? 0 : below(2 * 2304 + 1) - 2304;
    const uint32_t a = scales(), b = scales();
    float sum = static_cast<float>(std::ldexp(2 * rng_.uniform() - 1, below(60) - 30));
    if (below(10) == 0) sum = std::bit_cast<float>(word() & 0x807FFFFF);  // subnormal
    if (below(10) == 0) sum = 0;
    // Cancelled but for some bits.
    if (below(4) == 0) sum = -block_scaled_sum(dots, a, b, 0) * (1 + std::ldexp(1.0f, -below(24)));
    ASSERT_EQ(std::bit_cast<uint32_t>(block_scaled_sum(dots, a, b, sum)),
              std::bit_cast<uint32_t>(plain_step(dots, a, b, sum)))
        << dots[0] << " " << dots[1] << " " << dots[2] << " " << dots[3] << " " << a << " " << b << " " << sum;
  }
}

// The cases that distinguish it from other rules, by hand.
TEST_F(BlockScaledTest, AStepOfKnownSums) {
  constexpr uint32_t kOne = 0x38383838, kNan = 0x38387F38, kFar = 0x38383878;  // scale 2^8 in block 0
  EXPECT_EQ(block_scaled_sum({4, 4, 4, 4}, kOne, kOne, 0.5f), 4.5f);
  // Toward zero, in both directions.
  EXPECT_EQ(block_scaled_sum({1, 0, 0, 0}, kOne, kOne, 0x1p23f), 0x1p23f);
  EXPECT_EQ(block_scaled_sum({-1, 0, 0, 0}, kOne, kOne, 0x1p23f), 0x1.fffffep22f);
  EXPECT_EQ(block_scaled_sum({-1, 0, 0, 0}, kOne, kOne, -0x1p24f), -0x1p24f);
  // A sum is cut to 35 bits behind the largest scales' point, even where their products are zero.
  EXPECT_EQ(block_scaled_sum({0, 0, 0, 0}, kOne, kOne, 0x1.8p-35f), 0x1p-35f);
  EXPECT_EQ(block_scaled_sum({0, 0, 0, 0}, kFar, kOne, 0x1.8p-27f), 0x1.8p-27f - 0x1p-28f);
  EXPECT_EQ(std::bit_cast<uint32_t>(block_scaled_sum({0, 0, 0, 0}, kNan, kOne, 0)), 0x7FFFFFFFu);
  EXPECT_EQ(block_scaled_sum({4, 0, 0, 0}, kOne | 0x80808080, kOne, 0), 1) << "the sign bit of a scale";
}

// PTX ISA, "Matrix fragments for mma.m16n8k64" and "Scale factors": lane, register, and what it holds.
TEST_F(BlockScaledTest, UnitsAreTheInstructionsRegisters) {
  std::set<int> weights, inputs;
  for (int step = 0; step < 4; ++step) {
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, l = lane % 4;
      for (int i = 0; i < 4; ++i) {
        const int at = WeightUnit::codes_at(g + 8 * (i & 1), kStepColumns * step + 8 * l + 32 * (i >> 1));
        EXPECT_EQ(at, (step * 32 + lane) * 16 + i * 4);
        weights.insert(at);
      }
      for (int i = 0; i < 2; ++i) {
        const int at = InputUnit::codes_at(g, kStepColumns * step + 8 * l + 32 * i);
        EXPECT_EQ(at, (step / 2 * 32 + lane) * 16 + step % 2 * 8 + i * 4);
        inputs.insert(at);
      }
    }
    const int a_thread = step % 2, b_thread = step;
    for (int block = 0; block < 4; ++block) {
      for (int row = 0; row < 16; ++row) {
        const int lane = row % 8 * 4 + 2 * a_thread + row / 8;
        EXPECT_EQ(WeightUnit::scale_at(row, 4 * step + block), 2048 + (step / 2 * 32 + lane) * 4 + block);
        weights.insert(-WeightUnit::scale_at(row, 4 * step + block));
      }
      for (int row = 0; row < 8; ++row) {
        const int lane = row * 4 + b_thread;
        EXPECT_EQ(InputUnit::scale_at(row, 4 * step + block), 1024 + lane * 4 + block);
        inputs.insert(-InputUnit::scale_at(row, 4 * step + block));
      }
    }
  }
  EXPECT_EQ(weights.size(), 16u * 32 + 16 * 16);
  EXPECT_EQ(inputs.size(), 8u * 32 + 8 * 16);
  EXPECT_EQ(WeightUnit::kBytes, 2304);
  EXPECT_EQ(InputUnit::kBytes, 1152);
}

TEST_F(BlockScaledTest, PackingMovesBytes) {
  const auto weight = [&](int64_t rows, int64_t cols) {
    testing::RandomWeight made = testing::random_weight(rng_, WeightFormat::kNvfp4, rows, cols);
    for (const device::Buffer* buffer : {&made.data, &made.scales}) {
      for (size_t i = 0; i < buffer->size(); ++i) buffer->as<uint8_t>()[i] = static_cast<uint8_t>(below(256));
    }
    return made;
  };
  for (const int64_t rows : {1, 15, 16, 17, 130}) {
    testing::expect_round_trip(backends::sm120::kScaledUnits, weight(rows, 16 * (1 + below(40))));
  }
  if (!testing::kGpuIsEmulated) return;  // another GPU may lack the architecture
  device::Executor& gpu = testing::gpu_stage_memory().executor();
  device::Queue queue(1);
  const testing::RandomWeight made = weight(37, 16 * 41);
  const ops::PackedWeight expected = ops::pack_weight(&backends::sm120::kScaledUnits, made.view, queue);
  const device::Buffer data = made.data.clone_into(gpu.memory()), scales = made.scales.clone_into(gpu.memory());
  ops::WeightView placed = made.view;
  placed.data = data.data(), placed.block_scales = scales.data();
  const ops::PackedWeight packed = ops::pack_weight(&backends::sm120::kScaledUnits, placed, gpu.queue(), gpu.memory());
  const device::Buffer found(packed.data.size());
  gpu.memory().download(found.data(), packed.data.data(), found.size());
  ASSERT_EQ(found.size(), expected.data.size());
  EXPECT_EQ(std::memcmp(found.data(), expected.data.data(), found.size()), 0);
}

class LaneTest : public BlockScaledTest {
 protected:
#ifdef TESSERA_CUDA_EMULATED
  const testing::SumsMode mode_{false};  // plain_step() has the bits
#endif
  template <int kAThread, int kBThread>
  void check() {
    testing::ProductRegisters r;
    uint32_t row_codes[16][8], column_codes[8][8], row_scales[16], column_scales[8];
    float expected[16][8];
    for (auto& row : row_codes) {
      for (uint32_t& codes : row) codes = word();
    }
    for (auto& column : column_codes) {
      for (uint32_t& codes : column) codes = word();
    }
    for (uint32_t& bytes : row_scales) bytes = scales();
    for (uint32_t& bytes : column_scales) bytes = scales();
    for (auto& row : expected) {
      for (float& sum : row) sum = rng_.normal() * 100;
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, l = lane % 4;
      r.a[lane][0] = row_codes[g][l], r.a[lane][1] = row_codes[g + 8][l];
      r.a[lane][2] = row_codes[g][l + 4], r.a[lane][3] = row_codes[g + 8][l + 4];
      r.b[lane][0] = column_codes[g][l], r.b[lane][1] = column_codes[g][l + 4];
      r.a_scales[lane] = r.b_scales[lane] = 0x7F7F7F7F;  // nobody reads these
      if (l == 2 * kAThread) r.a_scales[lane] = row_scales[g];
      if (l == 2 * kAThread + 1) r.a_scales[lane] = row_scales[g + 8];
      if (l == kBThread) r.b_scales[lane] = column_scales[g];
      for (int i = 0; i < 4; ++i) r.sums[lane][i] = expected[g + 8 * (i >> 1)][2 * l + (i & 1)];
    }
    for (int row = 0; row < 16; ++row) {
      for (int column = 0; column < 8; ++column) {
        int dots[4] = {};
        for (int k = 0; k < 64; ++k) {
          const auto value = [&](uint32_t codes) {
            return static_cast<int>(2 * numeric::e2m1_to_float(static_cast<uint8_t>(codes >> 4 * (k % 8) & 15)));
          };
          dots[k / 16] += value(row_codes[row][k / 8]) * value(column_codes[column][k / 8]);
        }
        expected[row][column] = plain_step(dots, row_scales[row], column_scales[column], expected[row][column]);
      }
    }
    device::Executor& gpu = testing::gpu_stage_memory().executor();
    const device::Buffer there(sizeof(r), gpu.memory());
    for (const bool by_shuffles : {true, false}) {
      if (!by_shuffles && !testing::kGpuIsEmulated) break;
      testing::ProductRegisters made;
      gpu.memory().upload(there.data(), &r, sizeof(r));
      testing::run_product(kAThread, kBThread, by_shuffles, gpu.queue(), there.as<testing::ProductRegisters>());
      gpu.memory().download(&made, there.data(), sizeof(made));
      for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4; ++i) {
          EXPECT_EQ(made.sums[lane][i], expected[lane / 4 + 8 * (i >> 1)][2 * (lane % 4) + (i & 1)])
              << lane << " " << i << (by_shuffles ? " by shuffles" : "");
        }
      }
    }
  }
};

// On every GPU by shuffles, on the emulated one the instruction too.
TEST_F(LaneTest, ProductsReadTheRegistersOfTheTables) {
  std::string why_not;
  if (!testing::find_test_gpu(why_not).has_value()) GTEST_SKIP() << why_not;
  for (int run = 0; run < 5; ++run) {
    check<0, 0>(), check<0, 1>(), check<0, 2>(), check<0, 3>();
    check<1, 0>(), check<1, 1>(), check<1, 2>(), check<1, 3>();
  }
}

// Plain loops ------------------------------------------------------------------------------------------------------

// Chains of four steps from zero, added in ascending order.
float plain_sum(const ScaledRow& weight, const ScaledRow& input) {
  float total = 0;
  const bool is_fast = sums_are_fast();
  for (size_t unit = 0; unit < weight.halves.size(); unit += kUnitColumns) {
    float chain = 0;
    for (size_t step = unit; step < unit + kUnitColumns; step += kStepColumns) {
      int dots[4] = {};
      uint32_t a = 0, b = 0;
      for (size_t k = 0; k < kStepColumns; ++k) dots[k / 16] += weight.halves[step + k] * input.halves[step + k];
      for (size_t j = 0; j < 4; ++j) {
        a |= uint32_t{weight.scales[step / 16 + j]} << 8 * j, b |= uint32_t{input.scales[step / 16 + j]} << 8 * j;
      }
      chain = mma_sync_sum(is_fast, chain, dots, a, b);
    }
    total += chain;
  }
  return total;
}

bool is_block_scaled(const char* name) {
  return std::string(name) == "block_scaled";
}
class BlockScaledOpsTest : public BlockScaledTest {
 protected:
  using Edit = void (*)(testing::RandomWeight&, device::Tensor&);
  // Every `row_step`-th row of all groups' is held against plain loops.
  void check_linear(const ops::Linear::Desc& desc, int64_t num_tokens, Edit edit = nullptr, int64_t row_step = 1);
  // A GPU's exp is another: `gpu_bound` is how far it may be from plain loops.
  void check_experts(const ops::MoeExperts::Desc& desc, int64_t num_tokens, int64_t num_experts, Routing routing,
                     double gpu_bound = 0.03);
};

void BlockScaledOpsTest::check_linear(const ops::Linear::Desc& desc, int64_t num_tokens, Edit edit, int64_t row_step) {
  SCOPED_TRACE(desc.to_string() + ", " + std::to_string(num_tokens) + " tokens");
  const int64_t width = desc.groups * desc.in, outputs = desc.groups * desc.out;
  testing::RandomWeight weight = testing::random_weight(rng_, desc.format, outputs, desc.in);
  device::Tensor x =
      testing::as_tensor(testing::adversarial(rng_, num_tokens, width), DType::kBF16, {num_tokens, width});
  if (edit != nullptr) edit(weight, x);
  const int64_t first_row = below(static_cast<int>(row_step));
  std::vector<ScaledRow> rows(static_cast<size_t>(outputs));
  for (int64_t n = first_row; n < outputs; n += row_step) rows[static_cast<size_t>(n)] = weight_row(weight.view, n);
  std::vector<float> expected;
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t group = 0; group < desc.groups; ++group) {
      const ScaledRow input = input_row(x.as<uint16_t>() + t * width + group * desc.in, desc.in, 0);
      for (int64_t n = group * desc.out; n < (group + 1) * desc.out; ++n) {
        if (n % row_step != first_row) continue;
        const float y = plain_sum(rows[static_cast<size_t>(n)], input) * (input.factor * weight.view.tensor_scale);
        expected.push_back(desc.output == DType::kBF16 ? numeric::bf16_round(y) : y);
      }
    }
  }
  bool is_found = false;
  testing::for_each_variant<ops::Linear>(desc, [&](const ops::Variant<ops::Linear>& variant, bool) {
    if (!is_block_scaled(variant.name)) return;
    is_found = true;
    const testing::VariantWeight packed = testing::weight_for(variant, desc, weight.view);
    const std::vector<float> found = testing::run_linear(variant, desc, x, packed.view, 0, num_tokens, 1);
    std::vector<float> held;
    for (size_t i = 0; i < found.size(); ++i) {
      if (static_cast<int64_t>(i) % outputs % row_step == first_row) held.push_back(found[i]);
    }
    EXPECT_TRUE(testing::same_bits_or_nan(held, expected));
  });
  EXPECT_EQ(is_found, testing::has_backend("sm120"));
}

TEST_F(BlockScaledOpsTest, LinearHasTheBitsOfPlainLoops) {
  const auto desc = [](int64_t in, int64_t out, int64_t groups, DType output) {
    return ops::Linear::Desc{.in = in,
                             .out = out,
                             .groups = groups,
                             .format = WeightFormat::kNvfp4,
                             .input = InputMode::kA4,
                             .output = output};
  };
  // Widths and rows that fill units and don't; tokens that fill tiles and don't; more units than a block has warps.
  for (const int64_t in : {16, 48, 64, 240, 256, 272, 1040, 2304}) {
    for (const int64_t tokens : {1, 3, 8}) check_linear(desc(in, 1 + below(40), 1, DType::kF32), tokens);
  }
  for (const int64_t tokens : {9, 16, 17, 31, 32}) check_linear(desc(528, 33, 1, DType::kF32), tokens);
  check_linear(desc(4352, 16, 1, DType::kBF16), 10);
  check_linear(desc(272, 48, 3, DType::kBF16), 5);
  check_linear(desc(80, 32, 2, DType::kF32), 21);
  // The wide kernel: one tile, tiles with tails, all of its rows or none of a half.
  for (const int64_t tokens : {33, 64, 127, 128, 129}) {
    check_linear(desc(16 * (1 + below(40)), 190 + below(3), 1, tokens % 2 == 0 ? DType::kBF16 : DType::kF32), tokens);
  }
  check_linear(desc(544, 128, 2, DType::kBF16), 34 + below(100));
  check_linear(desc(256, 400, 1, DType::kF32), 261);  // blocks take several tiles
}

#ifdef TESSERA_CUDA_EMULATED
TEST_F(BlockScaledOpsTest, LinearInFp32HasTheBitsOfPlainLoopsInFp32) {
  const testing::SumsMode mode(true);
  for (const int64_t tokens : {3, 32, 130}) {
    check_linear({.in = 528, .out = 33, .format = WeightFormat::kNvfp4, .input = InputMode::kA4}, tokens);
  }
}
#endif

// A NaN makes its own row of outputs NaN, or its own output of all rows; infinity too. The row before ends where the
// NaN's begins.
TEST_F(BlockScaledOpsTest, NansStayWhereTheyAre) {
  const ops::Linear::Desc desc{
      .in = 320, .out = 40, .format = WeightFormat::kNvfp4, .input = InputMode::kA4, .output = DType::kF32};
  for (const int64_t tokens : {3, 20, 60}) {
    check_linear(desc, tokens, [](testing::RandomWeight& weight, device::Tensor& x) {
      weight.scales.as<uint8_t>()[11 * 20 + 19] = 0x7F;
      x.as<uint16_t>()[1 * 320 + 3] = 0x7FC0;
      x.as<uint16_t>()[2 * 320 + 300] = 0xFF80;
    });
  }
}

// Widths of Flash's and Pro's maps, their rows cut. Plain loops take seconds, the emulated GPU minutes.
class SlowBlockScaledTest : public BlockScaledOpsTest {
 protected:
  void SetUp() override {
    if (testing::kGpuIsEmulated) GTEST_SKIP() << "for a GPU";
  }
};

TEST_F(SlowBlockScaledTest, MapsOfFlashAndProHaveTheBitsOfPlainLoops) {
  for (const int64_t in : {1024, 1536, 2048, 3072, 4096, 7168, 16384}) {
    for (const int64_t tokens : {1, 8, 20, 150}) {
      const int64_t out = std::min<int64_t>(512, (int64_t{1} << 26) / (in * tokens) / 16 * 16 + 16);
      check_linear(
          {.in = in, .out = out, .format = WeightFormat::kNvfp4, .input = InputMode::kA4, .output = DType::kBF16},
          tokens);
    }
    // The wide kernel, of rows as few as make it the one that is taken.
    const ops::Linear::Desc wide{.in = in,
                                 .out = (testing::multiprocessors() / 2 + 1) * backends::sm120::WidePlan::kRows,
                                 .format = WeightFormat::kNvfp4,
                                 .input = InputMode::kA4,
                                 .output = DType::kBF16};
    const int64_t tokens = 33 + below(200);
    ASSERT_EQ(backends::sm120::linear_tile_tokens(wide, tokens, testing::multiprocessors()),
              backends::sm120::WidePlan::kTokens);
    check_linear(wide, tokens, nullptr, 127);
  }
}

// With arrays of their own, of which AddressSanitizer sees the ends.
TEST_F(BlockScaledOpsTest, NothingIsReadBehindAnArray) {
  if (!testing::kGpuIsEmulated) GTEST_SKIP() << "for the emulated GPU";
  const ops::Linear::Desc desc{.in = 528, .out = 192, .format = WeightFormat::kNvfp4, .input = InputMode::kA4};
  const testing::RandomWeight weight = testing::random_weight(rng_, desc.format, desc.out, desc.in);
  testing::for_each_variant<ops::Linear>(desc, [&](const ops::Variant<ops::Linear>& variant, bool) {
    if (!is_block_scaled(variant.name)) return;
    for (const int64_t tokens : {3, 13, 50}) {
      const device::Tensor rows =
          testing::as_tensor(testing::adversarial(rng_, tokens, desc.in), DType::kBF16, {tokens, desc.in});
      const std::vector<uint16_t> found =
          testing::run_on_own_arrays(*testing::staged_variant<ops::Linear>(), desc, weight, rows, tokens);
      const ScaledRow last = input_row(rows.as<uint16_t>() + (tokens - 1) * desc.in, desc.in, 0);
      EXPECT_EQ(found.back(), numeric::bf16_from_float(plain_sum(weight_row(weight.view, desc.out - 1), last) *
                                                       (last.factor * weight.view.tensor_scale)));
    }
  });
}

void BlockScaledOpsTest::check_experts(const ops::MoeExperts::Desc& desc, int64_t num_tokens, int64_t num_experts,
                                       Routing kind, double gpu_bound) {
  SCOPED_TRACE(desc.to_string() + ", " + std::to_string(num_tokens) + " tokens");
  const testing::ScaledExpertsCase experts(rng_, desc, num_tokens, num_experts, kind);
  const std::vector<float> expected = experts.expected(plain_sum);
  bool is_found = false;
  testing::for_each_variant<ops::MoeExperts>(desc, [&](const ops::Variant<ops::MoeExperts>& variant, bool) {
    if (!is_block_scaled(variant.name)) return;
    is_found = true;
    const std::vector<float> found = experts.found(variant, 0, num_tokens);
    if (testing::is_emulated(variant)) {
      EXPECT_TRUE(testing::same_bits_or_nan(found, expected));
    } else {
      EXPECT_TRUE(testing::is_close(found, expected, gpu_bound));
    }
  });
  EXPECT_EQ(is_found, testing::has_backend("sm120"));
}

TEST_F(BlockScaledOpsTest, ExpertsHaveTheBitsOfPlainLoops) {
  const auto desc = [](int64_t hidden, int64_t inner, int64_t first, int64_t local, float limit = 10) {
    return ops::MoeExperts::Desc{.hidden = hidden,
                                 .inner = inner,
                                 .first_expert = first,
                                 .num_local = local,
                                 .top_k = 2,
                                 .format = WeightFormat::kNvfp4,
                                 .input = InputMode::kA4,
                                 .swiglu_limit = limit};
  };
  // Few tokens to an expert, some, many; experts without one, of other ranks, and one that all choose.
  check_experts(desc(272, 80, 0, 4), 1, 4, Routing::kAny);
  check_experts(desc(64, 272, 0, 6), 7, 6, Routing::kNoneOfSome);
  check_experts(desc(256, 48, 0, 5, 0), 9, 5, Routing::kAny);
  check_experts(desc(96, 64, 3, 4), 40, 9, Routing::kAny);
  check_experts(desc(304, 96, 0, 5), 20, 5, Routing::kOneExpert);
  check_experts(desc(272, 80, 0, 3), 38 + below(9), 3, Routing::kAny);
  check_experts(desc(144, 160, 0, 3), 150 + below(20), 3, Routing::kOneExpert);
  check_experts(desc(64, 64, 2, 2), 70, 6, Routing::kNoneOfSome);
  check_experts(desc(32, 32, 8, 4), 5, 8, Routing::kAny);  // no slot is here
}

// Few tokens to an expert, and many.
TEST_F(SlowBlockScaledTest, ExpertsOfFlashAndPro) {
  for (const auto& [hidden, inner] : {std::pair<int64_t, int64_t>{4096, 2048}, {7168, 3072}}) {
    for (const auto& [num_tokens, kind] : {std::pair{8, Routing::kNoneOfSome}, {60, Routing::kOneExpert}}) {
      check_experts({.hidden = hidden,
                     .inner = inner,
                     .num_local = 3,
                     .top_k = 2,
                     .format = WeightFormat::kNvfp4,
                     .input = InputMode::kA4,
                     .swiglu_limit = 10},
                    num_tokens, 3, kind, testing::kBf16Bound);
    }
  }
}

}  // namespace
}  // namespace tessera
