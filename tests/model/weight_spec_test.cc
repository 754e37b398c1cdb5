// SPDX-License-Identifier: Apache-2.0
// Which rows of the head a rank has. Ranks with models cut otherwise: ranks_test.cc.
#include "model/weight_spec.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "model/weight_format.h"

namespace tessera::model {
namespace {

class HeadSlices : public ::testing::Test {
 protected:
  HeadSlices() {
    config_ = load_config(std::string(TESSERA_SOURCE_DIR) + "/models/tiny-v4");
    config_.vocab_size = 129280;  // of Flash and Pro: 2^8 * 5 * 101
  }
  WeightRow head() const {
    const std::vector<WeightRow> rows = make_weight_spec(config_, 1);
    return *std::find_if(rows.begin(), rows.end(), [](const WeightRow& row) { return row.name == "head"; });
  }
  // Whether ranks have equal runs of rows, one behind the other, whatever else is cut; or all of them everything.
  void expect_cut(const WeightRow& row, int64_t world, bool is_cut) const {
    for (const AttentionSplit attention : {AttentionSplit::kWhole, AttentionSplit::kByGroup}) {
      for (const ExpertSplit experts : {ExpertSplit::kById, ExpertSplit::kByWidth}) {
        for (int64_t rank = 0; rank < world; ++rank) {
          const WeightSlice slice = slice_of(row, config_, {rank, world, attention, experts});
          const int64_t share = is_cut ? config_.vocab_size / world : config_.vocab_size;
          EXPECT_EQ(slice.row_begin, is_cut ? rank * share : 0) << rank << " of " << world;
          EXPECT_EQ(slice.row_end - slice.row_begin, share) << rank << " of " << world;
          EXPECT_EQ(slice.col_begin, 0);
          EXPECT_EQ(slice.col_end, config_.hidden_size);
        }
      }
    }
  }
  Config config_;
};

TEST_F(HeadSlices, AreEqualRunsWhereRanksDivideTheVocabulary) {
  for (const int64_t world : {1, 2, 4, 5, 8, 101}) expect_cut(head(), world, true);
  for (const int64_t world : {3, 6, 7, 512}) expect_cut(head(), world, false);
}

// Widened to F32 as other maps are, such a head would have another kernel's bits.
TEST_F(HeadSlices, DoNotPartRowsThatShareScales) {
  WeightRow row = head();
  row.scale_rows = rows_of_a_scale(StoredFormat::kFp8Block);
  EXPECT_EQ(row.scale_rows, 128);
  for (const int64_t world : {1, 2, 5, 10}) expect_cut(row, world, true);
  for (const int64_t world : {4, 8}) expect_cut(row, world, false);
  for (const StoredFormat format : {StoredFormat::kF32, StoredFormat::kBf16, StoredFormat::kNvfp4,
                                    StoredFormat::kNvfp4Reciprocal, StoredFormat::kMxfp4}) {
    EXPECT_EQ(rows_of_a_scale(format), 1);
  }
}

// Of what is cut by heads the whole, or the other ranks' columns; of all else this rank's part.
TEST_F(HeadSlices, AllAreHeldWhereTheyAreKept) {
  const Shard cut{1, 2, AttentionSplit::kByGroup, ExpertSplit::kByWidth};
  Shard keeps = cut;
  keeps.keeps_all_heads = true;
  for (const WeightRow& row : make_weight_spec(config_, 1)) {
    EXPECT_EQ(held_shards(row, cut), std::vector<Shard>{cut}) << row.name;
    const std::vector<Shard> held = held_shards(row, keeps);
    ASSERT_FALSE(held.empty());
    EXPECT_EQ(held[0], keeps) << row.name;
    if (row.name.starts_with("mtp.")) {
      EXPECT_EQ(held.size(), 1u) << row.name;
      continue;
    }
    const bool has_rows = row.name.ends_with("wo_a") || row.name.ends_with("attn_sink") ||
                          (row.name.ends_with("wq_b") && !row.name.ends_with("indexer.wq_b"));
    if (has_rows) {
      ASSERT_EQ(held.size(), 2u) << row.name;
      const WeightSlice whole = slice_of(row, config_, held[1]), part = slice_of(row, config_, cut);
      EXPECT_EQ(whole.row_begin, 0);
      EXPECT_EQ(whole.row_end, row.shape[0]) << row.name;
      EXPECT_EQ(part.row_end - part.row_begin, row.shape[0] / 2) << "its own part stays";
    } else if (row.name.ends_with("wo_b")) {
      ASSERT_EQ(held.size(), 2u) << row.name;
      const WeightSlice other = slice_of(row, config_, held[1]);
      EXPECT_EQ(other.col_begin, 0);
      EXPECT_EQ(other.col_end, row.shape[1] / 2) << row.name;
    } else {
      EXPECT_EQ(held.size(), 1u) << row.name;
    }
    Shard whole = keeps;
    whole.attention = AttentionSplit::kWhole;
    EXPECT_EQ(held_shards(row, whole).size(), 1u) << "has all anyway";
  }
}

// A draft block has no head of its own, and who looks tokens up needs all rows of the embedding.
TEST_F(HeadSlices, AreOfTheHeadAlone) {
  for (const WeightRow& row : make_weight_spec(config_, 1)) {
    EXPECT_EQ(row.shard == ShardRule::kRowsByToken, row.name == "head") << row.name;
    if (row.name == "embed") expect_cut(row, 2, false);
  }
}

}  // namespace
}  // namespace tessera::model
