// SPDX-License-Identifier: Apache-2.0
// Steps on a GPU of which a call fails: one that says that memory has ended has done nothing, and any other error
// leaves a model that gives new states the bits that it gave before.
#include <gtest/gtest.h>

#include <cstdlib>

#include "base/error.h"
#include "device/cuda/emulated/faults.h"
#include "model/model_helpers.h"
#include "testing/compare.h"
#include "testing/generated_model.h"
#include "testing/seed.h"
#include "testing/temporary_folder.h"

namespace tessera {
namespace {

namespace emulated = device::emulated;

class StepFaults : public ::testing::Test {
 protected:
  StepFaults() {
    testing::write_generated_model(testing::smallest_config(), folder_.path());
    setenv("TESSERA_DEVICE", "cuda:0", 1);
    loaded_ = testing::load(folder_.path(), ops::InputMode::kA16, ops::CacheMode::kExact, 1, 16);
    ids_ = testing::random_ids(rng_, 10, loaded_.runner->facts().vocab_size);
  }
  ~StepFaults() override { emulated::disarm(); }

  // Two chunks of a prompt, then a step that is recorded; where the device fails, all of it again on a new state.
  std::vector<float> run() {
    for (;;) {
      try {
        return run_once();
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kDeviceError) << error.what();
        ++num_device_errors_;
      }
    }
  }

  std::vector<float> run_once() {
    std::unique_ptr<model::SequenceState> state;
    while (state == nullptr) {
      retry([&] { state = loaded_.runner->new_sequence(16); });
    }
    std::vector<float> rows;
    for (const size_t end : {size_t{4}, size_t{9}, size_t{10}}) {
      const size_t begin = static_cast<size_t>(state->position());
      while (static_cast<size_t>(state->position()) < end) {
        retry([&] {
          const std::vector<float> found = testing::feed(
              *loaded_.runner, *state, std::span(ids_).subspan(begin, end - begin), model::LogitRows::kLast);
          rows.insert(rows.end(), found.begin(), found.end());
        });
        const auto position = static_cast<size_t>(state->position());
        EXPECT_TRUE(position == begin || position == end) << position;
      }
    }
    // Two tokens that are drawn, the second of them queued before the first is known.
    int32_t id = 3;
    for (uint64_t position = 11; position < 13;) {
      retry([&] {
        model::Draw first{.position = position}, second{.position = position + 1};
        model::Draw* const place = &second;
        const model::SequenceSlice slice{state.get(), {&id, 1}, model::LogitRows::kNone, &first};
        loaded_.runner->queue_step({&slice, 1});
        const bool is_ahead = position == 11 && loaded_.runner->queue_next({&place, 1});
        loaded_.runner->finish_step();
        if (is_ahead) loaded_.runner->finish_step();
        rows.push_back(static_cast<float>(first.token));
        if (is_ahead) rows.push_back(static_cast<float>(second.token));
        id = is_ahead ? second.token : first.token;
        position += is_ahead ? 2 : 1;
      });
    }
    return rows;
  }

  // Once; want of memory is no harm.
  template <class Call>
  void retry(const Call& call) {
    try {
      call();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kResourceExhausted) throw;
      ++num_short_;
    }
  }

  const testing::TemporaryFolder folder_;
  model::LoadedModel loaded_;
  Rng rng_{fresh_seed()};
  std::vector<int32_t> ids_;
  int num_device_errors_ = 0, num_short_ = 0;
};

TEST_F(StepFaults, FailWholeOrNotAtAll) {
  emulated::disarm();
  const std::vector<float> expected = run();
  const auto total = static_cast<uint64_t>(emulated::num_calls());
  // What some calls fail at does no harm and is not noticed: so many trials that enough are.
  constexpr int kTrials = 10, kMostTrials = 100, kEnough = 3;
  const auto num_noticed = [&] { return num_device_errors_ + num_short_; };
  for (int i = 0; i < kTrials || (i < kMostTrials && num_noticed() < kEnough); ++i) {
    const emulated::Fault fault{.nth = 1 + static_cast<int64_t>(rng_.below(total)),
                                .count = rng_.below(2) == 0 ? 1 : 2 + static_cast<int64_t>(rng_.below(4)),
                                .code = i % 2 == 0 ? cudaErrorMemoryAllocation : cudaErrorLaunchFailure};
    emulated::arm(fault);
    const std::vector<float> found = run();
    const std::string failed = emulated::failed_call();
    emulated::disarm();
    ASSERT_TRUE(testing::same_bits(found, expected))
        << fault.count << " from " << fault.nth << " of " << total << " calls, " << cudaGetErrorName(fault.code)
        << ", first " << failed;
  }
  EXPECT_GE(num_noticed(), kEnough);
}

}  // namespace
}  // namespace tessera
