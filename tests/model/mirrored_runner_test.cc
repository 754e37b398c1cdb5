// SPDX-License-Identifier: Apache-2.0
// A model of two ranks behind one runner: what one rank does, it does.
#include "model/mirrored_runner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backends/registry.h"
#include "base/error.h"
#include "comm/joined_ranks.h"
#include "comm/tcp_communicator.h"
#include "model/load_model.h"
#include "model/model_helpers.h"

namespace tessera::model {
namespace {

using tessera::testing::feed;
using tessera::testing::run_joined;
using ::testing::Each;

const std::string kTiny = std::string(TESSERA_SOURCE_DIR) + "/models/tiny-v4";
const std::vector<int32_t> kPrompt = {0, 17, 300, 45, 9, 812, 44, 44, 7};

std::unique_ptr<Runner> load(comm::Communicator* comm) {
  LoadOptions options;
  options.num_threads = 1;
  options.with_draft = false;
  options.comm = comm;
  if (comm != nullptr) options.shard = {comm->rank(), comm->world(), AttentionSplit::kWhole, ExpertSplit::kById};
  return load_model(kTiny, options, backends::all_backends(), device::probe_machine(), nullptr, nullptr).runner;
}

ErrorCode code_of_step(Runner& runner, SequenceState& state, std::span<const int32_t> ids) {
  const SequenceSlice slice{&state, ids};
  try {
    runner.step({&slice, 1});
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::kInternal;
}

// Sequences that are copied, taken back, kept and refused.
std::vector<float> use(Runner& runner) {
  std::vector<float> logits;
  const auto keep = [&](SequenceState& state, std::vector<int32_t> ids) {
    const std::vector<float> rows = feed(runner, state, ids, LogitRows::kAll);
    logits.insert(logits.end(), rows.begin(), rows.end());
  };
  auto state = runner.new_sequence(20);
  keep(*state, kPrompt);
  const auto snapshot = state->snapshot();
  const auto mark = state->mark();
  const auto copy = state->fork();
  keep(*copy, {5, 6});
  keep(*state, {7, 8});
  state->rollback(*mark);
  keep(*state, {5, 6});
  EXPECT_EQ(code_of_step(runner, *state, std::vector<int32_t>(12, 3)), ErrorCode::kInvalidArgument);  // too long
  EXPECT_EQ(code_of_step(runner, *state, std::vector<int32_t>{-1}), ErrorCode::kInvalidArgument);
  state.reset();
  keep(*runner.resume(*snapshot, 64), {9, 10, 11});
  EXPECT_THROW(runner.new_sequence(int64_t{1} << 40), Error);
  Draw draw;
  const std::vector<int32_t> ids = {4};
  const SequenceSlice slice{copy.get(), ids, LogitRows::kNone, &draw};
  runner.step({&slice, 1});
  logits.push_back(static_cast<float>(draw.token));
  return logits;
}

TEST(MirroredRunner, GivesTheBitsOfOneRank) {
  std::vector<float> shared;
  const auto errors = run_joined(2, [&](comm::Bootstrap& bootstrap) {
    const auto comm = comm::make_tcp(bootstrap, 120);
    const auto runner = load(comm.get());
    if (bootstrap.rank() == 0) {
      MirroredRunner mirrored(*runner, bootstrap);
      shared = use(mirrored);
    } else {
      follow(*runner, bootstrap);
    }
    bootstrap.all_gather({});
  });
  EXPECT_THAT(errors, Each(""));
  EXPECT_EQ(shared, use(*load(nullptr)));
}

}  // namespace
}  // namespace tessera::model
