// SPDX-License-Identifier: Apache-2.0
// Models cut over ranks that are threads of this process, against the whole model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <thread>

#include "backends/registry.h"
#include "base/error.h"
#include "checkpoint/checkpoint.h"
#include "comm/loopback.h"
#include "comm/ranks.h"
#include "model/model_helpers.h"
#include "model/weight_source.h"
#include "testing/compare.h"
#include "testing/generated_model.h"
#include "testing/temporary_folder.h"

namespace tessera::model {
namespace {

using tessera::testing::argmax;
using tessera::testing::feed;
using tessera::testing::run_ranks;
using ::testing::Each;
using ::testing::HasSubstr;

const std::string kTiny = std::string(TESSERA_SOURCE_DIR) + "/models/tiny-v4";
const std::vector<int32_t> kPrompt = {0, 17, 300, 45, 9, 812, 44, 44, 7, 501, 77, 90, 3, 614, 255, 31, 8};
constexpr int kNewTokens = 24;

struct Result {
  std::vector<float> prompt_logits;  // of every token
  std::vector<int32_t> tokens;       // greedy
  std::vector<float> last_logits;

  // Bits: -0 is not 0.
  bool operator==(const Result& other) const {
    return tokens == other.tokens && testing::same_bits(prompt_logits, other.prompt_logits) &&
           testing::same_bits(last_logits, other.last_logits);
  }
};

struct Cut {
  int world;
  AttentionSplit attention;
  ExpertSplit experts;
};

LoadOptions options_for(const Cut& cut, comm::Communicator* comm) {
  LoadOptions options;
  options.num_threads = 1;
  if (comm == nullptr) return options;
  options.comm = comm;
  options.shard = {comm->rank(), cut.world, cut.attention, cut.experts};
  return options;
}

Result run_model(const LoadOptions& options, const std::string& folder = kTiny, int64_t chunk = 0,
                 uint64_t* weight_bytes = nullptr) {
  LoadedModel loaded = load_model(folder, options, backends::all_backends(), device::probe_machine(), nullptr, nullptr);
  if (weight_bytes != nullptr) *weight_bytes = static_cast<uint64_t>(loaded.runner->facts().weight_bytes);
  auto state = loaded.runner->new_sequence(256);
  Result result;
  result.prompt_logits = feed(*loaded.runner, *state, kPrompt, LogitRows::kAll, chunk);
  const size_t vocab = static_cast<size_t>(loaded.config.vocab_size);
  int32_t token = argmax(std::span(result.prompt_logits).last(vocab));
  for (int i = 0; i < kNewTokens; ++i) {
    result.tokens.push_back(token);
    result.last_logits = feed(*loaded.runner, *state, std::span(&token, 1), LogitRows::kLast);
    token = argmax(result.last_logits);
  }
  return result;
}

// What each rank has; all of them have it.
std::vector<Result> run_cut(const Cut& cut, const std::string& folder = kTiny, int64_t chunk = 0) {
  auto ranks = comm::make_loopback(cut.world, 120);
  std::vector<Result> results(ranks.size());
  EXPECT_THAT(run_ranks(ranks,
                        [&](comm::Communicator& comm, device::Queue&) {
                          results[static_cast<size_t>(comm.rank())] = run_model(options_for(cut, &comm), folder, chunk);
                        }),
              Each(""));
  return results;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return std::sqrt(difference / norm);
}

// Over positions.
double median_distance(const std::vector<float>& a, const std::vector<float>& b) {
  std::vector<double> distances;
  const size_t vocab = a.size() / kPrompt.size();
  for (size_t t = 0; t < kPrompt.size(); ++t) {
    const auto row = [&](const std::vector<float>& rows) {
      return std::vector<float>(rows.begin() + static_cast<ptrdiff_t>(t * vocab),
                                rows.begin() + static_cast<ptrdiff_t>((t + 1) * vocab));
    };
    distances.push_back(distance(row(a), row(b)));
  }
  std::sort(distances.begin(), distances.end());
  return distances[distances.size() / 2];
}

const Result& one_rank() {
  static const Result result = run_model(options_for({}, nullptr));
  return result;
}

void expect_same_tokens(const Cut& cut) {
  const std::vector<Result> results = run_cut(cut);
  for (const Result& result : results) {
    EXPECT_EQ(result.tokens, one_rank().tokens);
    // Two orders of sums, rounded to BF16; at a few positions a choice of the router or the indexer turns on that.
    EXPECT_LE(median_distance(result.prompt_logits, one_rank().prompt_logits), 0.02);
    EXPECT_TRUE(result == results.front()) << "every rank has the same bits";
  }
}

TEST(Ranks, ExpertsByIdAloneChangeNoBit) {
  for (const int world : {2, 4, 8}) {
    for (const Result& result : run_cut({world, AttentionSplit::kWhole, ExpertSplit::kById})) {
      EXPECT_TRUE(result == one_rank()) << world;
    }
  }
}

TEST(Ranks, HeadsAndExpertsById) {
  expect_same_tokens({2, AttentionSplit::kByGroup, ExpertSplit::kById});
}

TEST(Ranks, HeadsAndExpertsByWidth) {
  expect_same_tokens({2, AttentionSplit::kByGroup, ExpertSplit::kByWidth});
}

TEST(Ranks, ExpertsByWidthOverMoreRanksThanGroups) {
  expect_same_tokens({4, AttentionSplit::kWhole, ExpertSplit::kByWidth});
}

TEST(Ranks, SamePlanSameBitsWhateverTheChunks) {
  const Cut cut{2, AttentionSplit::kByGroup, ExpertSplit::kByWidth};
  const Result first = run_cut(cut).front();
  EXPECT_TRUE(run_cut(cut).front() == first) << "another run";
  EXPECT_TRUE(run_cut(cut, kTiny, 5).front() == first) << "chunks of 5";
  EXPECT_TRUE(run_cut(cut, kTiny, 1).front() == first) << "decode equals prefill";
}

// Nothing is rounded there, so that only the order of sums differs.
TEST(Ranks, UnroundedLogitsDifferByTheOrderOfSumsAlone) {
  const testing::TemporaryFolder folder;
  testing::write_generated_model(testing::Generated::kT0, folder.path());
  const auto logits = [&](LoadOptions options) {
    options.precision = {ops::InputMode::kF32, ops::CacheMode::kExact};
    LoadedModel loaded =
        load_model(folder.path(), options, backends::all_backends(), device::probe_machine(), nullptr, nullptr);
    auto state = loaded.runner->new_sequence(64);
    std::vector<int32_t> ids;
    for (int32_t i = 0; i < 40; ++i) ids.push_back(i * 37 % loaded.runner->facts().vocab_size);
    return feed(*loaded.runner, *state, ids, LogitRows::kAll);
  };
  const std::vector<float> whole = logits(options_for({}, nullptr));
  for (const ExpertSplit experts : {ExpertSplit::kById, ExpertSplit::kByWidth}) {
    const Cut cut{2, AttentionSplit::kByGroup, experts};
    auto ranks = comm::make_loopback(2, 120);
    EXPECT_THAT(
        run_ranks(ranks, [&](comm::Communicator& comm,
                             device::Queue&) { EXPECT_LE(distance(logits(options_for(cut, &comm)), whole), 1e-5); }),
        Each(""));
  }
}

// Each reads its slices and no more.
TEST(Ranks, EachHoldsAndReadsItsShare) {
  class Bytes final : public ProgressSink {
   public:
    void begin(std::string_view, uint64_t, std::string_view) override {}
    void advance(uint64_t amount) override { read += amount; }
    void end() override {}
    uint64_t read = 0;
  };
  const Config config = load_config(kTiny);
  const checkpoint::Checkpoint checkpoint = checkpoint::Checkpoint::open(kTiny);
  const auto read_all = [&](const Shard& shard, uint64_t& held) {
    Bytes bytes;
    WeightSource source(checkpoint, config, 0, shard, &bytes);
    held = source.total_bytes();
    for (const WeightRow& row : make_weight_spec(config, 0)) {
      if (row.kind != WeightKind::kLinear) continue;
      const Shape shape = source.local_shape(row.name);
      if (shape.num_elements() > 0) source.load_matrix(row.name);
    }
    return bytes.read;
  };
  uint64_t whole_held = 0, expert_bytes = 0;
  const uint64_t whole_read = read_all({}, whole_held);
  // BF16 in the bundled model.
  const auto head_bytes = static_cast<uint64_t>(2 * config.vocab_size * config.hidden_size);
  for (const WeightRow& row : make_weight_spec(config, 0)) {
    if (row.expert >= 0) expert_bytes += static_cast<uint64_t>(row.shape.num_elements()) * 9 / 16;
  }
  for (const ExpertSplit experts : {ExpertSplit::kById, ExpertSplit::kByWidth}) {
    for (int64_t rank = 0; rank < 4; ++rank) {
      uint64_t held = 0;
      const uint64_t read = read_all({rank, 4, AttentionSplit::kWhole, experts}, held);
      EXPECT_LE(held, whole_held - expert_bytes * 3 / 4 - head_bytes * 3 / 4);
      EXPECT_LE(read, whole_read - expert_bytes * 3 / 4 - head_bytes * 3 / 4);
    }
  }
}

// The parts of a rank that keeps all heads: the bits of one rank's, and what is counted is what is read.
TEST(Ranks, WhoKeepsAllHeadsHoldsTheOthers) {
  const Config config = load_config(kTiny);
  const checkpoint::Checkpoint checkpoint = checkpoint::Checkpoint::open(kTiny);
  WeightSource whole(checkpoint, config, 0, {}, nullptr);
  const auto bytes_of = [](const Matrix& matrix) {
    const auto* bytes = matrix.data.as<uint8_t>();
    return std::vector<uint8_t>(bytes, bytes + matrix.data.size());
  };
  for (int64_t rank = 0; rank < 2; ++rank) {
    const Shard cut{rank, 2, AttentionSplit::kByGroup, ExpertSplit::kById};
    Shard keeps = cut;
    keeps.keeps_all_heads = true;
    WeightSource own(checkpoint, config, 0, cut, nullptr), all(checkpoint, config, 0, keeps, nullptr);
    uint64_t more = 0;
    for (const WeightRow& row : make_weight_spec(config, 0)) {
      for (const Shard& held : held_shards(row, keeps)) {
        if (held == keeps) continue;
        if (row.kind == WeightKind::kVector) {
          const device::Tensor vector = all.load_vector_part(row.name, held), expected = whole.load_vector(row.name);
          ASSERT_EQ(vector.view().shape, expected.view().shape) << row.name;
          EXPECT_TRUE(
              std::equal(vector.as<float>(), vector.as<float>() + row.shape.num_elements(), expected.as<float>()))
              << row.name;
          more += static_cast<uint64_t>(row.shape.num_elements()) * 4;
          continue;
        }
        const Matrix part = all.load_part(row.name, held, nullptr);
        more += part.data.size() + part.scales.size();
        if (held.attention == AttentionSplit::kWhole) {
          EXPECT_EQ(bytes_of(part), bytes_of(whole.load_matrix(row.name))) << row.name;
        } else {
          Shard other = cut;
          other.rank = 1 - rank;
          EXPECT_EQ(bytes_of(part), bytes_of(WeightSource(checkpoint, config, 0, other, nullptr).load_matrix(row.name)))
              << row.name;
        }
      }
    }
    EXPECT_GT(more, 0u);
    EXPECT_EQ(all.total_bytes(), own.total_bytes() + more);
    const auto parts_bytes = [](const WeightSource& source) {
      uint64_t sum = 0;
      for (const checkpoint::FilePart& part : source.parts_in_order()) sum += part.num_bytes;
      return sum;
    };
    EXPECT_GT(parts_bytes(all), parts_bytes(own));
    EXPECT_LT(parts_bytes(all), parts_bytes(whole));
  }
}

TEST(Ranks, WhatCanNotBeCutIsNamed) {
  const Config config = load_config(kTiny);
  const checkpoint::Checkpoint checkpoint = checkpoint::Checkpoint::open(kTiny);
  const auto refusal = [&](const Shard& shard) -> std::string {
    try {
      WeightSource source(checkpoint, config, 0, shard, nullptr);
      for (const WeightRow& row : make_weight_spec(config, 0)) {
        if (row.kind == WeightKind::kLinear) source.load_matrix(row.name);
      }
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(refusal({0, 4, AttentionSplit::kByGroup, ExpertSplit::kById}),
              HasSubstr("2 output groups can't be cut over 4 ranks"));
  EXPECT_THAT(refusal({0, 3, AttentionSplit::kWhole, ExpertSplit::kById}),
              HasSubstr("16 experts can't be cut over 3 ranks"));
  EXPECT_THAT(refusal({0, 16, AttentionSplit::kWhole, ExpertSplit::kByWidth}),
              HasSubstr("a rank's columns must be whole groups of 16"));
}

// A rank whose weights are damaged says so; the other does not wait for it for ever.
TEST(Ranks, ARankThatFailsToLoadEndsTheOther) {
  auto ranks = comm::make_loopback(2, 120);
  const Cut cut{2, AttentionSplit::kByGroup, ExpertSplit::kById};
  const auto errors = run_ranks(ranks, [&](comm::Communicator& comm, device::Queue&) {
    if (comm.rank() == 1) fail(ErrorCode::kDataLoss, "a damaged shard");
    run_model(options_for(cut, &comm));
  });
  EXPECT_EQ(errors[1], "a damaged shard");
  EXPECT_EQ(errors[0], "rank 1 failed: a damaged shard");
}

}  // namespace
}  // namespace tessera::model
