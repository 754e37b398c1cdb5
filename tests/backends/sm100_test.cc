// SPDX-License-Identifier: Apache-2.0
// Datacenter Blackwell's NVFP4 maps on the emulated GPU, or on a Hopper GPU with tcgen05 in software
// (TESSERA_SM100_EMULATED): bit for bit what a loop over the model of the products' sums gives, near the reference, and
// the same for a row whoever is beside it.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <set>

#include "backends/cuda_common/ptx/emulated/product_sums.h"
#include "backends/gpu_instructions.h"
#include "backends/layout_round_trip.h"
#include "backends/scaled_experts.h"
#include "backends/sm100/packed_tiles.h"
#include "backends/sm100/sums_plan.h"
#include "backends/sm100_shapes.h"
#include "ops/linear/linear.h"
#include "ops/reference_rows.h"
#include "tensor/scale_layout.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

using backends::sm100::PackedTile;
namespace emulated = backends::cuda_common::ptx::emulated;
using numeric::kNvfp4Block;
using testing::Routing, testing::ScaledRow;

// What the tensor cores add up for a row of each: one chain of products of 64 columns from zero, ascending.
float chain_of(const ScaledRow& weight, const ScaledRow& input) {
  uint32_t sum = 0;
  const bool is_fast = emulated::sums_are_fast();
  constexpr size_t kColumns = 64, kScales = emulated::kGroupsOfProduct;
  for (size_t begin = 0; begin < weight.halves.size(); begin += kColumns) {
    int groups[kScales] = {};
    uint8_t weight_scales[kScales], input_scales[kScales];
    for (size_t k = 0; k < kColumns; ++k) {
      groups[k / kNvfp4Block] += weight.halves[begin + k] * input.halves[begin + k];
    }
    std::copy_n(weight.scales.begin() + static_cast<int64_t>(begin / kNvfp4Block), kScales, weight_scales);
    std::copy_n(input.scales.begin() + static_cast<int64_t>(begin / kNvfp4Block), kScales, input_scales);
    sum = emulated::tcgen05_sum(is_fast, sum, groups, weight_scales, input_scales);
  }
  return std::bit_cast<float>(sum);
}

template <class Op>
const ops::Variant<Op>& blackwell_variant() {
  for (const ops::Backend* backend : backends::all_backends()) {
    if (std::string(backend->name) == "sm100") return backend->variants_of<Op>()[0];
  }
  throw std::out_of_range("sm100");
}

class BlackwellTest : public testing::RandomTest {
 protected:
  void SetUp() override {
    std::string why_not;
    if (!testing::find_test_gpu(why_not).has_value()) GTEST_SKIP() << why_not;
    if (!testing::kGpuIsEmulated && !testing::has_backend("sm100")) GTEST_SKIP() << "not Blackwell";
  }
  // Every `row_step`-th row is held against plain loops; all of them where tokens are computed again, which is by
  // other kernels where they are fewer.
  void check(const ops::Linear::Desc& desc, int64_t num_tokens, int64_t row_step = 1);
  void check_experts(const ops::MoeExperts::Desc& desc, int64_t num_tokens, int64_t num_experts, Routing kind,
                     double gpu_bound = 0.03);
  int64_t some(int64_t from, int64_t below) {
    return from + static_cast<int64_t>(rng_.below(static_cast<uint64_t>(below)));
  }
};

void BlackwellTest::check(const ops::Linear::Desc& desc, int64_t num_tokens, int64_t row_step) {
  SCOPED_TRACE(desc.to_string() + ", " + std::to_string(num_tokens) + " tokens");
  const ops::Variant<ops::Linear>& variant = blackwell_variant<ops::Linear>();
  testing::staged_variant<ops::Linear>() = &variant;
  ops::Variant<ops::Linear> staged = variant;
  staged.run = testing::run_on_gpu<ops::Linear>;
  std::string why_not;
  ASSERT_TRUE(variant.supports(desc, why_not)) << why_not;

  const testing::RandomWeight weight = testing::random_weight(rng_, desc.format, desc.groups * desc.out, desc.in);
  const testing::VariantWeight packed = testing::weight_for(variant, desc, weight.view);
  const int64_t width = desc.groups * desc.in, rows = desc.groups * desc.out;
  std::vector<float> x = testing::adversarial(rng_, num_tokens, width);
  const device::Tensor input = testing::as_tensor(x, desc.activation, {num_tokens, width});
  ops::load_floats(input, 0, static_cast<int64_t>(x.size()), x.data());  // as rounded when stored
  const std::vector<float> found = testing::run_linear(staged, desc, input, packed.view, 0, num_tokens, 1);

  const int64_t first_row = some(0, row_step);
  std::vector<ScaledRow> weights(static_cast<size_t>(rows));
  for (int64_t n = first_row; n < rows; n += row_step) {
    weights[static_cast<size_t>(n)] = testing::weight_row(weight.view, n);
  }
  std::vector<float> expected, held;
  for (int64_t row = 0; row < num_tokens * desc.groups; ++row) {
    const ScaledRow values =
        testing::input_row(std::span(x).subspan(static_cast<size_t>(row * desc.in), static_cast<size_t>(desc.in)), 0);
    for (int64_t n = row % desc.groups * desc.out; n < (row % desc.groups + 1) * desc.out; ++n) {
      if (n % row_step != first_row) continue;
      const float y = chain_of(weights[static_cast<size_t>(n)], values) * (values.factor * weight.view.tensor_scale);
      expected.push_back(ops::round_to(desc.output, y));
      held.push_back(found[static_cast<size_t>(row / desc.groups * rows + n)]);
    }
  }
  EXPECT_TRUE(testing::same_bits(held, expected)) << "the model's sums";
  if (row_step == 1) {
    EXPECT_TRUE(testing::is_close(
        found, testing::run_linear(testing::kScalarLinear, desc, input, weight.view, 0, num_tokens, 2),
        desc.output == DType::kF32 ? testing::kF32Bound : testing::kBf16Bound));
  }
  for (const int64_t token : {int64_t{0}, num_tokens - 1, some(0, num_tokens)}) {
    const int64_t count = std::min(num_tokens - token, some(1, 9));
    EXPECT_TRUE(testing::same_bits(
        testing::run_linear(staged, desc, input, packed.view, token, count, 1),
        std::span(found).subspan(static_cast<size_t>(token * rows), static_cast<size_t>(count * rows))))
        << count << " tokens from " << token << " on";
  }
}

TEST_F(BlackwellTest, Linear) {
  for (const DType output : {DType::kBF16, DType::kF32}) {
    const auto desc = [&](int64_t in, int64_t out, int64_t groups) {
      return ops::Linear::Desc{.in = in,
                               .out = out,
                               .groups = groups,
                               .format = ops::WeightFormat::kNvfp4,
                               .input = ops::InputMode::kA4,
                               .output = output};
    };
    check(desc(256, 128, 1), 1);
    check(desc(16 * some(1, 80), some(1, 300), 1), some(1, 8));
    check(desc(320, some(129, 128), 1), some(65, 64));  // two tiles of rows: of 64 tokens, on three multiprocessors
    check(desc(64 * some(1, 8), 128 * some(1, 2), some(2, 3)), some(9, 40));
    check(desc(2048 + 48, some(129, 200), 1), some(8, 2));            // around the stages' ring more than once
    check(desc(some(1, 30) * 16, some(700, 200), 1), some(100, 28));  // tiles a block, tokens of two tiles
    // Pairs of blocks: a tile that is not full, one that is, two; rows for one of the two blocks.
    check(desc(some(1, 30) * 16, some(1, 128), 1), some(129, 40));
    check(desc(some(20, 30) * 16, some(129, 300), 1), 192);
    check(desc(some(1, 30) * 16, 128 * some(1, 3), 2), some(193, 60));
    // Of 256 tokens, whose sums overlap: both sets and the first again; tiles of few tokens behind full ones. Of more
    // than 256 rows by two pairs: rows for one block of the four to all, around the ring.
    const bool is_bf16 = output == DType::kBF16;
    check(desc(some(1, 12) * 16, some(1, 100), 1), is_bf16 ? some(513, 100) : some(385, 100));
    check(desc(some(is_bf16 ? 49 : 1, 4) * 16, is_bf16 ? some(513, 100) : some(257, 256), 1),
          is_bf16 ? some(193, 16) : some(385, 64));
    if (is_bf16) check(desc(some(1, 4) * 16, 128 * some(3, 2), 2), some(193, 64));
  }
  // Last tiles of fewer tokens than the sets share, in either set; the tiles before are full. By a pair four tiles or
  // five, by two pairs two of rows for each tile of tokens.
  struct Case {
    int64_t rows, full_tokens;
  };
  for (const Case& one : {Case{some(1, 256), 768}, Case{some(1, 256), 1024}, Case{some(513, 100), 768}}) {
    const int64_t tokens = one.full_tokens + some(1, 47);
    ASSERT_EQ(backends::sm100::pair_tile_tokens({.out = one.rows}, tokens, 2), backends::sm100::kWidePairTileTokens);
    check({.in = 16 * some(1, 2), .out = one.rows, .format = ops::WeightFormat::kNvfp4, .input = ops::InputMode::kA4},
          tokens);
  }
  check({.in = 272,
         .out = 40,
         .format = ops::WeightFormat::kNvfp4,
         .input = ops::InputMode::kA4,
         .activation = DType::kF32,
         .output = DType::kF32},
        17);
}

void BlackwellTest::check_experts(const ops::MoeExperts::Desc& desc, int64_t num_tokens, int64_t num_experts,
                                  Routing kind, double gpu_bound) {
  SCOPED_TRACE(desc.to_string() + ", " + std::to_string(num_tokens) + " tokens");
  const ops::Variant<ops::MoeExperts>& variant = blackwell_variant<ops::MoeExperts>();
  testing::staged_variant<ops::MoeExperts>() = &variant;
  ops::Variant<ops::MoeExperts> staged = variant;
  staged.run = testing::run_on_gpu<ops::MoeExperts>;
  std::string why_not;
  ASSERT_TRUE(variant.supports(desc, why_not)) << why_not;
  const testing::ScaledExpertsCase experts(rng_, desc, num_tokens, num_experts, kind);
  const std::vector<float> found = experts.found(staged, 0, num_tokens), expected = experts.expected(chain_of);
  if (testing::kGpuIsEmulated) {
    EXPECT_TRUE(testing::same_bits_or_nan(found, expected));
  } else {
    // A GPU's exp is another. Of few values of h one that is rounded the other way weighs more.
    EXPECT_TRUE(testing::is_close(found, expected, gpu_bound));
  }
  const int64_t token = some(0, num_tokens), count = std::min(num_tokens - token, some(1, 9));
  const size_t width = static_cast<size_t>(desc.top_k * desc.hidden);
  EXPECT_TRUE(testing::same_bits(
      experts.found(staged, token, count),
      std::span(found).subspan(static_cast<size_t>(token) * width, static_cast<size_t>(count) * width)))
      << count << " tokens from " << token << " on";
}

TEST_F(BlackwellTest, Experts) {
  const auto desc = [](int64_t hidden, int64_t inner, int64_t first, int64_t local, float limit = 10) {
    return ops::MoeExperts::Desc{.hidden = hidden,
                                 .inner = inner,
                                 .first_expert = first,
                                 .num_local = local,
                                 .top_k = 2,
                                 .format = ops::WeightFormat::kNvfp4,
                                 .input = ops::InputMode::kA4,
                                 .swiglu_limit = limit};
  };
  // Few tokens to an expert and many, tiles with tails, rows of h that fill a stage, half of it, or two; experts
  // without a token, of other ranks, one that all choose; no clamp.
  check_experts(desc(272, 80, 0, 4), 1, 4, Routing::kAny);
  check_experts(desc(64, 272, 0, 6), 7, 6, Routing::kNoneOfSome);
  check_experts(desc(256, 48, 0, 5, 0), 9, 5, Routing::kAny);
  check_experts(desc(144, 384, 0, 3, 0), some(60, 20), 3, Routing::kOneExpert);
  check_experts(desc(96, 256, 3, 4), 40, 9, Routing::kAny);
  check_experts(desc(304, 96, 0, 5), 20, 5, Routing::kOneExpert);
  check_experts(desc(272, 80, 0, 5), 40, 5, Routing::kAny);  // more tiles than experts and tiles of 128 would be
  check_experts(desc(272, 80, 0, 3), some(38, 9), 3, Routing::kAny);
  check_experts(desc(144, 160, 0, 3), some(150, 20), 3, Routing::kOneExpert);
  // Sums that the sets share, of tiles around them: three tiles of gate and up a multiprocessor.
  check_experts(desc(80, 400, 0, 3), some(81, 48), 3, Routing::kOneExpert);
  check_experts(desc(64, 64, 2, 2), 70, 6, Routing::kNoneOfSome);
  check_experts(desc(32, 32, 8, 4), 5, 8, Routing::kAny);  // no slot is here
}

// Widths of Flash's and Pro's maps and experts, rows cut. Plain loops take seconds, the emulated GPU minutes.
class SlowBlackwellTest : public BlackwellTest {
 protected:
  static constexpr int64_t kRowStep = 127;  // one of each tile and, one after another, every place in it

  void SetUp() override {
    if (testing::kGpuIsEmulated) GTEST_SKIP() << "for a GPU";
    BlackwellTest::SetUp();
  }
  static ops::Linear::Desc map(int64_t in, int64_t out, int64_t groups = 1) {
    ops::Linear::Desc desc = testing::map_of_rows(out, groups);
    desc.in = in;
    return desc;
  }
  // A map of that shape; which kernel takes it is asserted.
  void check_shape(const testing::TiledShape& shape, int64_t in, int64_t row_step = 1) {
    const ops::Linear::Desc desc = map(in, shape.rows + some(0, shape.more_rows + 1), shape.groups);
    const int64_t tokens = shape.tokens + some(0, shape.more_tokens + 1), multiprocessors = testing::multiprocessors();
    ASSERT_EQ(backends::sm100::linear_tile_tokens(desc, tokens, multiprocessors), shape.tile_tokens);
    ASSERT_EQ(testing::tile_blocks_of(desc, tokens, multiprocessors), shape.tile_blocks);
    check(desc, tokens, row_step);
  }
  // All shapes of tiles by so many blocks.
  void check_shapes(int tile_blocks, int64_t least_in, int64_t more_in) {
    for (const testing::TiledShape& shape : testing::tiled_shapes(testing::multiprocessors())) {
      if (shape.tile_blocks == tile_blocks) check_shape(shape, 16 * (least_in / 16 + some(0, more_in / 16 + 1)));
    }
  }
  void check_widths(int64_t hidden, int64_t inner, int64_t num_tokens, Routing kind) {
    constexpr int64_t kExperts = 3;
    check_experts({.hidden = hidden,
                   .inner = inner,
                   .num_local = kExperts,
                   .top_k = 2,
                   .format = ops::WeightFormat::kNvfp4,
                   .input = ops::InputMode::kA4,
                   .swiglu_limit = 10},
                  num_tokens, kExperts, kind, testing::kBf16Bound);
  }
};

// Every kernel of maps at every width: few tokens with few rows, and with rows as few as make it the one that is taken;
// where tokens are to be many, at the narrowest.
TEST_F(SlowBlackwellTest, MapsOfFlashAndPro) {
  const std::vector<testing::TiledShape> shapes = testing::tiled_shapes(testing::multiprocessors());
  for (const int64_t in : {1024, 1536, 2048, 3072, 4096, 7168, 16384}) {
    for (const int64_t tokens : {1, 8, 20, 150}) {
      check(map(in, std::min<int64_t>(512, (int64_t{1} << 26) / (in * tokens) / 16 * 16 + 16)), tokens);
    }
    std::set<std::pair<int32_t, int>> kernels;
    for (const testing::TiledShape& shape : shapes) {
      const bool is_first = kernels.insert({shape.tile_tokens, shape.tile_blocks}).second;
      const bool is_long = shape.tokens > 1000 && in > 1024;
      if (is_first && shape.tile_blocks > 0 && !is_long) check_shape(shape, in, kRowStep);
    }
  }
}

TEST_F(SlowBlackwellTest, OneBlock) {
  check_shapes(1, 512, 512);
}
TEST_F(SlowBlackwellTest, PairsOfBlocks) {
  check_shapes(2, 16, 304);
}
// Around the ring.
TEST_F(SlowBlackwellTest, TwoPairsOfBlocks) {
  check_shapes(4, 960, 480);
}
TEST_F(SlowBlackwellTest, PairsAloneOrTwo) {
  check_shapes(0, 16, 48);
}

TEST_F(SlowBlackwellTest, ExpertsOfFlash) {
  check_widths(4096, 2048, 8, Routing::kAny);
  check_widths(4096, 2048, 30, Routing::kOneExpert);
}

TEST_F(SlowBlackwellTest, ExpertsOfPro) {
  check_widths(7168, 3072, 8, Routing::kNoneOfSome);
  check_widths(7168, 3072, 30, Routing::kOneExpert);
}

// A row of x that holds a NaN, or an infinity, makes its own outputs NaN and no others.
TEST_F(BlackwellTest, NanStaysInItsRow) {
  const ops::Linear::Desc desc{
      .in = 320, .out = 130, .format = ops::WeightFormat::kNvfp4, .input = ops::InputMode::kA4};
  const ops::Variant<ops::Linear>& variant = blackwell_variant<ops::Linear>();
  testing::staged_variant<ops::Linear>() = &variant;
  ops::Variant<ops::Linear> staged = variant;
  staged.run = testing::run_on_gpu<ops::Linear>;
  const testing::RandomWeight weight = testing::random_weight(rng_, desc.format, desc.out, desc.in);
  const testing::VariantWeight packed = testing::weight_for(variant, desc, weight.view);
  std::vector<float> x = testing::adversarial(rng_, 11, desc.in);
  x[4 * 320 + 319] = std::numeric_limits<float>::quiet_NaN(), x[10 * 320 + 7] = std::numeric_limits<float>::infinity();
  const device::Tensor input = testing::as_tensor(x, DType::kBF16, {11, desc.in});
  const std::vector<float> found = testing::run_linear(staged, desc, input, packed.view, 0, 11, 1);
  for (size_t i = 0; i < found.size(); ++i) {
    const size_t token = i / static_cast<size_t>(desc.out);
    ASSERT_EQ(std::isnan(found[i]), token == 4 || token == 10) << "token " << token;
  }
}

TEST_F(BlackwellTest, NothingIsReadBehindAnArray) {
  if (!testing::kGpuIsEmulated) GTEST_SKIP() << "for the emulated GPU";
  // Few tokens, a tile of many, and of a pair, whose odd block has no rows in the last tile; of two pairs, of which the
  // second has one block without.
  const ops::Linear::Desc desc{
      .in = 528, .out = 300, .format = ops::WeightFormat::kNvfp4, .input = ops::InputMode::kA4};
  const testing::RandomWeight weight = testing::random_weight(rng_, desc.format, desc.out, desc.in);
  for (const int64_t tokens : {3, 90, 150, 250}) {
    const device::Tensor rows =
        testing::as_tensor(testing::adversarial(rng_, tokens, desc.in), DType::kBF16, {tokens, desc.in});
    const std::vector<uint16_t> found =
        testing::run_on_own_arrays(blackwell_variant<ops::Linear>(), desc, weight, rows, tokens);
    const ScaledRow last = testing::input_row(rows.as<uint16_t>() + (tokens - 1) * desc.in, desc.in, 0);
    EXPECT_EQ(found.back(), numeric::bf16_from_float(chain_of(testing::weight_row(weight.view, desc.out - 1), last) *
                                                     (last.factor * weight.view.tensor_scale)));
  }
}

// Packed scales are CUTLASS's and cuBLASLt's 128 x 4 layout of the same matrix, but for the codes between.
TEST_F(BlackwellTest, PackedTilesKeepEveryBit) {
  for (const int64_t rows : {1, 127, 128, 129, 300}) {
    const int64_t cols = 16 * some(1, 60);
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(cols));
    const testing::RandomWeight weight = testing::random_weight(rng_, ops::WeightFormat::kNvfp4, rows, cols);
    const ops::PackedLayout& layout = *backends::sm100::packed_tiles();
    testing::expect_round_trip(layout, weight);
    device::Queue queue;
    const ops::PackedWeight packed = ops::pack_weight(&layout, weight.view, queue);
    const int64_t tiles = PackedTile::tiles_of_row(cols), blocks = cols / kNvfp4Block;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t scale = sf128x4_offset(row, block, tiles * PackedTile::kBlocks);
        constexpr int64_t kTileScales = PackedTile::kBytes - PackedTile::kCodeBytes;
        const int64_t at = scale / kTileScales * PackedTile::kBytes + PackedTile::kCodeBytes + scale % kTileScales;
        ASSERT_EQ(packed.data.as<uint8_t>()[at], weight.scales.as<uint8_t>()[row * blocks + block]);
      }
    }
  }
}

TEST_F(BlackwellTest, AGpuPacksAsTheHostDoes) {
  device::Executor& gpu = testing::gpu_stage_memory().executor();
  device::Queue queue;
  const testing::RandomWeight weight = testing::random_weight(rng_, ops::WeightFormat::kNvfp4, 137, 16 * 41);
  const ops::PackedWeight expected = ops::pack_weight(backends::sm100::packed_tiles(), weight.view, queue);
  const device::Buffer data = weight.data.clone_into(gpu.memory()), scales = weight.scales.clone_into(gpu.memory());
  ops::WeightView placed = weight.view;
  placed.data = data.data(), placed.block_scales = scales.data();
  const ops::PackedWeight packed = ops::pack_weight(backends::sm100::packed_tiles(), placed, gpu.queue(), gpu.memory());
  ASSERT_EQ(packed.data.size(), expected.data.size());
  const device::Buffer found(expected.data.size());
  gpu.memory().download(found.data(), packed.data.data(), found.size());
  EXPECT_EQ(std::memcmp(found.data(), expected.data.data(), found.size()), 0);
}

}  // namespace
}  // namespace tessera
