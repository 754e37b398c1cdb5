// SPDX-License-Identifier: Apache-2.0
#pragma once
// What tests that drive the step loop by hand have in common: a runner made of hashes, a room, a clock that stands
// still.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "engine/hash_runner.h"
#include "engine/step_loop.h"

namespace tessera::engine {

class StillClock final : public Clock {
 public:
  double now() const override { return time; }
  double time = 10;
};

class StepLoopFixture : public testing::Test {
 protected:
  static Request request(std::vector<int32_t> prompt, int64_t max_tokens) {
    Request one;
    one.prompt = std::move(prompt), one.max_tokens = max_tokens, one.stop_at_end_token = false;
    return one;
  }

  // The request, as one that was let in; ids rise from 1.
  void accept(StepLoop& loop, const Request& request, std::shared_ptr<Sink> sink) {
    EXPECT_FALSE(loop.find_refusal(request));
    EXPECT_FALSE(room_.enter(static_cast<int64_t>(request.prompt.size())));
    loop.accept(++last_id_, request, std::move(sink), clock_.time);
  }

  PagedBudget budget_{4, 100000};
  HashRunner runner_{8, 100, budget_, {}, 1};
  WaitingRoom room_{{}};
  StillClock clock_;
  RequestId last_id_ = 0;
};

}  // namespace tessera::engine
