// SPDX-License-Identifier: Apache-2.0
// Index maps of Blackwell's kernels: what lies in tensor memory, in packed weights and in input tiles has a place of
// its own, and the places are those that the products' descriptors name.
#include <gtest/gtest.h>

#include <set>

#include "backends/cuda_common/ptx/emulated/tcgen05_decode.h"
#include "backends/sm100/input_tile.h"
#include "backends/sm100/packed_tiles.h"
#include "backends/sm100/sums_plan.h"
#include "backends/sm100/tensor_plan.h"
#include "backends/sm100_shapes.h"

namespace tessera {
namespace {

using namespace backends::sm100;
using backends::cuda_common::ScaleAtom;
namespace emulated = backends::cuda_common::ptx::emulated;

// Takes [first, first + count), which nobody has taken.
void take(std::set<int64_t>& taken, int64_t first, int64_t count) {
  for (int64_t i = first; i < first + count; ++i) EXPECT_TRUE(taken.insert(i).second) << i;
}

template <int kMatrices, int kTokens>
void check_plan() {
  using Plan = TensorPlan<kMatrices, kTokens>;
  std::set<int64_t> columns;
  for (int set = 0; set < Plan::kSets; ++set) {
    for (int i = 0; i < kMatrices; ++i) take(columns, Plan::sums(set, i), kTokens);
    for (int operand = 0; operand <= kMatrices; ++operand) {
      for (int product = 0; product < PackedTile::kProducts; ++product) {
        const int atoms = operand == kMatrices ? InputTile::atoms(kTokens) : 1;
        take(columns, Plan::scales(set, operand, product), atoms * ScaleAtom::kColumns);
      }
    }
  }
  EXPECT_EQ(*columns.begin(), 0);
  EXPECT_EQ(*columns.rbegin() + 1, static_cast<int64_t>(columns.size())) << "no gaps";
  EXPECT_LE(columns.size(), size_t{512});
}

TEST(Sm100Plan, ColumnsOfTensorMemoryAreOnesOwn) {
  check_plan<1, kFewTileTokens>();
  check_plan<1, kMostTileTokens>();
  check_plan<1, kPairTileTokens>();
  check_plan<2, kFewTileTokens>();
}

// Two sets do not fit beside scales: what they share is the end of one and the begin of the other, of which no other
// tokens' columns are, and scales have columns that are no set's.
template <int kMatrices, int kTokens>
void check_overlap() {
  using Plan = TensorPlan<kMatrices, kTokens>;
  std::set<int64_t> sets[2], columns;
  for (int set = 0; set < 2; ++set) {
    for (int i = 0; i < kMatrices; ++i) take(sets[set], Plan::sums(set, i), kTokens);
  }
  std::set<int64_t> shared;
  for (const int64_t column : sets[0]) {
    if (sets[1].contains(column)) shared.insert(column);
  }
  EXPECT_EQ(static_cast<int>(shared.size()), Plan::kSharedColumns);
  for (int set = 0; set < 2; ++set) {
    const int matrix = set == 0 ? kMatrices - 1 : 0;
    std::set<int64_t> named;
    take(named, Plan::sums(set, matrix) + static_cast<uint32_t>(Plan::first_shared(set)), Plan::kSharedColumns);
    EXPECT_EQ(named, shared) << "set " << set;
    columns.insert(sets[set].begin(), sets[set].end());
  }
  EXPECT_EQ(Plan::kScaleSets, 1);
  for (int operand = 0; operand <= kMatrices; ++operand) {
    for (int product = 0; product < PackedTile::kProducts; ++product) {
      const int atoms = operand == kMatrices ? InputTile::atoms(kTokens) : 1;
      take(columns, Plan::scales(0, operand, product), atoms * ScaleAtom::kColumns);
    }
  }
  EXPECT_EQ(*columns.begin(), 0);
  EXPECT_EQ(*columns.rbegin(), 511);
  EXPECT_EQ(columns.size(), size_t{512});
}

TEST(Sm100Plan, SetsThatDoNotFitTwiceOverlap) {
  check_overlap<1, kWidePairTileTokens>();
  check_overlap<2, kMostTileTokens>();
}

// Pairs have the tiles that take fewer rounds of products; the wide ones where they take little more.
TEST(Sm100Plan, PairsTakeTheTilesOfFewestProducts) {
  const auto tokens = [](int64_t out, int64_t num_tokens) {
    const ops::Linear::Desc desc{.in = 4096, .out = out, .format = ops::WeightFormat::kNvfp4};
    return linear_tile_tokens(desc, num_tokens, 148);
  };
  EXPECT_EQ(tokens(8192, 8192), kWidePairTileTokens);  // 14 rounds, 19 of 192
  EXPECT_EQ(tokens(1024, 4096), kWidePairTileTokens);  // 1, 2
  EXPECT_EQ(tokens(4096, 4096), kWidePairTileTokens);  // 4 of 256, 5 of 192
  EXPECT_EQ(tokens(32768, 190), kPairTileTokens);      // one tile of tokens
  EXPECT_EQ(tokens(32768, 380), kPairTileTokens);      // 4 of 256, 4 of 192
  EXPECT_EQ(tokens(32768, 128), kMostTileTokens);
}

// What tests on a GPU think that they run: at both ends of the rows and tokens that they take.
TEST(Sm100Plan, ShapesHaveTheTilesTheyAreFor) {
  for (const int64_t multiprocessors : {132, 148, 152, 160}) {
    for (const testing::TiledShape& shape : testing::tiled_shapes(multiprocessors)) {
      for (const int64_t rows : {shape.rows, shape.rows + shape.more_rows}) {
        for (const int64_t tokens : {shape.tokens, shape.tokens + shape.more_tokens}) {
          SCOPED_TRACE(std::to_string(multiprocessors) + " multiprocessors, " + std::to_string(rows) + " rows, " +
                       std::to_string(tokens) + " tokens");
          const ops::Linear::Desc desc = testing::map_of_rows(rows, shape.groups);
          EXPECT_EQ(linear_tile_tokens(desc, tokens, multiprocessors), shape.tile_tokens);
          EXPECT_EQ(testing::tile_blocks_of(desc, tokens, multiprocessors), shape.tile_blocks);
        }
      }
    }
  }
}

// Two pairs together where that costs them few rounds: never of rows that one pair has alone.
TEST(Sm100Plan, TwoPairsShareWhereTheirRoundsAreFew) {
  const auto shares = [](int64_t out, int64_t num_tokens, int64_t clusters) {
    const ops::Linear::Desc desc{.in = 4096, .out = out, .format = ops::WeightFormat::kNvfp4};
    return takes_two_pairs(desc, num_tokens, 148, clusters);
  };
  EXPECT_TRUE(shares(8192, 8192, 37));   // 14 rounds, of pairs 14
  EXPECT_TRUE(shares(8192, 8192, 33));   // 16
  EXPECT_FALSE(shares(8192, 8192, 31));  // 17
  EXPECT_TRUE(shares(1024, 4096, 37));   // 1, 1
  EXPECT_FALSE(shares(256, 4096, 37));
  EXPECT_FALSE(shares(8192, 8192, 0));  // no place for such a cluster
  constexpr ops::Linear::Desc kDesc{.in = 4096, .out = 600, .groups = 3, .format = ops::WeightFormat::kNvfp4};
  EXPECT_EQ(two_pair_tiles(kDesc, 300), 3 * 2 * 2);
}

TEST(Sm100Plan, PackedTilesHaveAPlaceForEveryByte) {
  std::set<int64_t> bytes;
  for (int row = 0; row < PackedTile::kRows; ++row) {
    for (int block = 0; block < PackedTile::kBlocks; ++block) {
      take(bytes, PackedTile::codes_at(row, block), 8);
      take(bytes, PackedTile::scale_at(row, block), 1);
    }
  }
  EXPECT_EQ(static_cast<int>(bytes.size()), PackedTile::kBytes);
  EXPECT_EQ(*bytes.rbegin() + 1, PackedTile::kBytes);
}

TEST(Sm100Plan, InputTilesHaveAPlaceForEveryByteOfTheirRows) {
  constexpr int64_t kWidth = 600;  // three stages
  for (const int rows : {8, 40, 128, 144, 192, 256}) {
    std::set<int64_t> bytes;
    for (int row = 0; row < rows; ++row) {
      for (int block = 0; block < 3 * PackedTile::kBlocks; ++block) {
        take(bytes, InputTile::codes_at(rows, row, block), 8);
        take(bytes, InputTile::scale_at(rows, row, block), 1);
      }
    }
    const int64_t all = InputTile::bytes(rows, InputTile::atoms(rows), kWidth);
    EXPECT_LT(*bytes.rbegin(), all);
    EXPECT_EQ(all, 3 * InputTile::stage_bytes(rows));
  }
}

// What a product reads by its descriptors is what packing put there: of each product of a stage, all rows and bytes.
TEST(Sm100Plan, DescriptorsReadWhatWasPacked) {
  constexpr uint32_t kAddress = 7 * 1024;
  for (int product = 0; product < PackedTile::kProducts; ++product) {
    emulated::SharedMatrix codes{}, scales{};
    ASSERT_EQ(emulated::decode_shared_matrix(backends::cuda_common::advance_descriptor(
                                                 backends::cuda_common::codes_descriptor(kAddress), 32 * product),
                                             codes),
              nullptr);
    const uint32_t atom = kAddress + static_cast<uint32_t>(PackedTile::kCodeBytes + product * ScaleAtom::kBytes);
    ASSERT_EQ(emulated::decode_shared_matrix(backends::cuda_common::scales_descriptor(atom), scales), nullptr);
    for (uint32_t row = 0; row < PackedTile::kRows; ++row) {
      for (uint32_t byte = 0; byte < 32; ++byte) {
        const int block = product * 4 + static_cast<int>(byte) / 8;
        EXPECT_EQ(codes.address(row, byte),
                  kAddress + static_cast<uint32_t>(PackedTile::codes_at(static_cast<int>(row), block)) + byte % 8);
      }
      for (int scale = 0; scale < 4; ++scale) {
        // Column row / 32 of lane row % 32: four bytes of the lane's sixteen.
        EXPECT_EQ(scales.address(row % 32, row / 32 * 4 + static_cast<uint32_t>(scale)),
                  kAddress + static_cast<uint32_t>(PackedTile::scale_at(static_cast<int>(row), product * 4 + scale)));
      }
    }
  }
}

}  // namespace
}  // namespace tessera
