// SPDX-License-Identifier: Apache-2.0
// Logits of ranks that have a part of the vocabulary each: all of them, on every rank, with the bits of one that has
// all. Experts are cut by id, which changes nothing else.
#include "model/layers/vocabulary_head.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "backends/registry.h"
#include "checkpoint/checkpoint.h"
#include "comm/loopback.h"
#include "comm/ranks.h"
#include "model/model_helpers.h"
#include "model/weight_source.h"
#include "testing/compare.h"
#include "testing/generated_model.h"
#include "testing/temporary_folder.h"
#include "testing/trace_recorder.h"

namespace tessera::model {
namespace {

using tessera::testing::feed;
using tessera::testing::run_ranks;
using ::testing::Each;

constexpr int64_t kStepTokens = 2 * VocabularyHead::kGatheredRows + 37;
constexpr int64_t kSequences = 3;

class VocabularyHeadTest : public ::testing::Test {
 protected:
  void write(const std::string& vocab = "64") {
    std::string config = testing::generated_config(testing::Generated::kT0);
    const std::string field = "\"vocab_size\": ";
    const size_t at = config.find(field);
    ASSERT_NE(at, std::string::npos);
    config.replace(at + field.size(), 2, vocab);
    testing::write_generated_model(config, folder_.path());
  }
  LoadOptions options_of(comm::Communicator* comm) const {
    LoadOptions options;
    options.precision = {ops::InputMode::kF32, ops::CacheMode::kExact};
    options.num_threads = 1;
    options.max_step_tokens = kStepTokens;
    if (comm == nullptr) return options;
    options.comm = comm;
    options.shard = {comm->rank(), comm->world(), AttentionSplit::kWhole, ExpertSplit::kById};
    return options;
  }
  LoadedModel load(comm::Communicator* comm) const {
    return load_model(folder_.path(), options_of(comm), backends::all_backends(), device::probe_machine(), nullptr,
                      nullptr);
  }
  // Of every token of a step, in which rows are gathered three times; of the draft block behind it; of one token, and
  // of a step of several sequences.
  std::vector<float> logits(comm::Communicator* comm) const {
    const LoadedModel loaded = load(comm);
    const auto state = loaded.runner->new_sequence(kStepTokens + 1);
    const std::vector<int32_t> ids = ids_of(loaded, kStepTokens + 1);
    const std::span<const int32_t> prompt(ids.data(), kStepTokens);
    std::vector<float> all = feed(*loaded.runner, *state, prompt, LogitRows::kAll);
    const SequenceSlice next{state.get(), std::span(ids).last(kStepTokens), LogitRows::kAll};
    append(loaded.runner->draft({&next, 1}), all);
    append(feed(*loaded.runner, *state, std::span(ids).last(1), LogitRows::kLast), all);
    std::vector<std::unique_ptr<SequenceState>> states;
    std::vector<SequenceSlice> slices;
    for (int64_t i = 0; i < kSequences; ++i) {
      states.push_back(loaded.runner->new_sequence(8));
      slices.push_back({states.back().get(), std::span(ids).subspan(static_cast<size_t>(5 * i), 4), LogitRows::kLast});
    }
    append(loaded.runner->step(slices), all);
    for (SequenceSlice& slice : slices) slice.logits = LogitRows::kNone;
    loaded.runner->step(slices);  // nobody's
    return all;
  }
  static std::vector<int32_t> ids_of(const LoadedModel& loaded, int64_t count) {
    std::vector<int32_t> ids;
    for (int64_t t = 0; t < count; ++t) {
      ids.push_back(static_cast<int32_t>((3 * t * t + 7 * t + 5) % loaded.config.vocab_size));
    }
    return ids;
  }
  static void append(const std::vector<float>& from, std::vector<float>& to) {
    to.insert(to.end(), from.begin(), from.end());
  }
  static void append(const TensorView& from, std::vector<float>& to) {
    to.insert(to.end(), from.as<float>(), from.as<float>() + from.shape.num_elements());
  }
  // Work on ranks that are threads; none may fail.
  template <class Work>
  static void run(int world, const Work& work) {
    auto ranks = comm::make_loopback(world, 120);
    EXPECT_THAT(run_ranks(ranks, [&](comm::Communicator& comm, device::Queue&) { work(comm); }), Each(""));
  }
  Shape head_shape(int world) const {
    const Config config = load_config(folder_.path());
    const checkpoint::Checkpoint checkpoint = checkpoint::Checkpoint::open(folder_.path());
    return WeightSource(checkpoint, config, 1, {world - 1, world, AttentionSplit::kWhole, ExpertSplit::kById}, nullptr)
        .local_shape("head");
  }
  testing::TemporaryFolder folder_;
};

TEST_F(VocabularyHeadTest, EveryRankHasTheLogitsOfOne) {
  write();
  const std::vector<float> whole = logits(nullptr);
  EXPECT_EQ(whole.size(), static_cast<size_t>(64 * (2 * kStepTokens + 1 + kSequences)));
  for (const int world : {2, 4, 8}) {
    EXPECT_EQ(head_shape(world)[0], 64 / world);
    run(world, [&](comm::Communicator& comm) {
      EXPECT_TRUE(testing::same_bits(logits(&comm), whole)) << "rank " << comm.rank() << " of " << world;
    });
  }
}

// 63 tokens are no two equal runs: each rank has the whole head and asks nobody.
TEST_F(VocabularyHeadTest, StaysWholeWhereRanksDoNotDivideTheVocabulary) {
  write("63");
  const std::vector<float> whole = logits(nullptr);
  EXPECT_EQ(head_shape(2)[0], 63);
  run(2, [&](comm::Communicator& comm) { EXPECT_TRUE(testing::same_bits(logits(&comm), whole)) << comm.rank(); });
}

// Who looks at the head's output sees all of it, as on one rank.
TEST_F(VocabularyHeadTest, IsTracedWhole) {
  write();
  run(2, [&](comm::Communicator& comm) {
    const LoadedModel loaded = load(&comm);
    testing::TraceRecorder recorder({"head"});
    loaded.runner->set_tracer(&recorder);
    const auto state = loaded.runner->new_sequence(8);
    const std::vector<int32_t> ids = ids_of(loaded, 5);
    const std::vector<float> found = feed(*loaded.runner, *state, ids, LogitRows::kAll);
    EXPECT_TRUE(testing::same_bits(recorder.floats("head"), found)) << comm.rank();
  });
}

TEST_F(VocabularyHeadTest, ScratchIsOfSoManyRowsAtMost) {
  constexpr int64_t kVocab = 129280, kRows = VocabularyHead::kGatheredRows;
  EXPECT_EQ(VocabularyHead::scratch_bytes(kVocab, 1, 4096), 0);
  const int64_t most = VocabularyHead::scratch_bytes(kVocab, 2, kRows);
  EXPECT_EQ(most, 4 * kRows * kVocab * 3 / 2);
  EXPECT_EQ(VocabularyHead::scratch_bytes(kVocab, 2, 4096), most);
  EXPECT_LT(VocabularyHead::scratch_bytes(kVocab, 2, 2), most / 60);
}

}  // namespace
}  // namespace tessera::model
