// SPDX-License-Identifier: Apache-2.0
// Requests that are held to something: what the step loop draws, where it asks, and how it ends.
#include <gtest/gtest.h>

#include "engine/collector.h"
#include "engine/generate.h"
#include "engine/hash_runner.h"
#include "engine/step_loop.h"

namespace tessera::engine {
namespace {

class StillClock final : public Clock {
 public:
  double now() const override { return 10; }
};

// After token t only 2 t + 1 and 2 t + 2, modulo the vocabulary less its end token; anything first. Ends after `most`
// tokens, or has none left after `none_after`.
class Binary final : public TokenConstraint {
 public:
  Binary(int64_t most, int64_t none_after) : most_(most), none_after_(none_after) {}
  Allowed allowed(std::span<uint32_t> mask) override {
    if (num_drawn_ == none_after_) return Allowed::kNone;
    if (num_drawn_ == 0) return Allowed::kAll;
    for (int32_t i = 1; i <= 2; ++i) mask[0] |= uint32_t{1} << child(last_, i);
    return Allowed::kSome;
  }
  void drawn(int32_t id) override {
    EXPECT_TRUE(num_drawn_ == 0 || id == child(last_, 1) || id == child(last_, 2)) << last_ << " " << id;
    last_ = id, ++num_drawn_;
  }
  bool has_ended() const override { return num_drawn_ == most_; }

  static int32_t child(int32_t id, int32_t i) { return 1 + (2 * id + i) % (kHashVocab - 1); }

 private:
  const int64_t most_, none_after_;
  int64_t num_drawn_ = 0;
  int32_t last_ = 0;
};

class BinarySource final : public ConstraintSource {
 public:
  explicit BinarySource(int64_t most = -1, int64_t none_after = -1) : most_(most), none_after_(none_after) {}
  std::unique_ptr<TokenConstraint> begin() const override { return std::make_unique<Binary>(most_, none_after_); }

 private:
  const int64_t most_, none_after_;
};

// All tokens but one, by a mask that others have too, up to the `most`-th draw; then asked, and all.
class Shared final : public TokenConstraint {
 public:
  Shared(std::shared_ptr<const std::vector<uint32_t>> mask, int64_t most) : mask_(std::move(mask)), most_(most) {}
  std::span<const uint32_t> shared_mask() const override {
    return num_drawn_ < most_ ? std::span<const uint32_t>(*mask_) : std::span<const uint32_t>();
  }
  Allowed allowed(std::span<uint32_t>) override {
    EXPECT_GE(num_drawn_, most_) << "asked for no need";
    return Allowed::kAll;
  }
  void drawn(int32_t) override { ++num_drawn_; }
  bool has_ended() const override { return false; }

 private:
  const std::shared_ptr<const std::vector<uint32_t>> mask_;
  const int64_t most_;
  int64_t num_drawn_ = 0;
};

class SharedSource final : public ConstraintSource {
 public:
  SharedSource(std::shared_ptr<const std::vector<uint32_t>> mask, int64_t most) : mask_(std::move(mask)), most_(most) {}
  std::unique_ptr<TokenConstraint> begin() const override { return std::make_unique<Shared>(mask_, most_); }

 private:
  const std::shared_ptr<const std::vector<uint32_t>> mask_;
  const int64_t most_;
};

class Keep final : public GenerateObserver {
 public:
  bool token(int32_t) override { return true; }
};

class ConstraintTest : public testing::Test {
 protected:
  std::vector<std::shared_ptr<Collector>> run(const std::vector<Request>& requests, int64_t swap_bytes = 0) {
    StepLoopOptions options;
    options.swap_bytes = swap_bytes;
    StepLoop loop(runner_, budget_, room_, clock_, options);
    std::vector<std::shared_ptr<Collector>> sinks;
    for (const Request& request : requests) {
      EXPECT_FALSE(loop.find_refusal(request));
      EXPECT_FALSE(room_.enter(static_cast<int64_t>(request.prompt.size())));
      sinks.push_back(std::make_shared<Collector>(request.num_choices));
      loop.accept(++last_id_, request, sinks.back(), 10);
    }
    while (loop.step()) loop.audit();
    EXPECT_TRUE(loop.is_idle());
    return sinks;
  }
  static Request request(int32_t first, int64_t max_tokens, std::shared_ptr<const ConstraintSource> constraint) {
    Request one;
    one.prompt = {first, 2, 3}, one.max_tokens = max_tokens, one.stop_at_end_token = false;
    one.sampling.params.seed = 7;
    one.constraint = std::move(constraint);
    return one;
  }
  std::vector<int32_t> alone(const Request& request, uint64_t seed) {
    GenerateOptions options;
    options.max_tokens = request.max_tokens, options.stop_at_end_token = false;
    options.sampling = request.sampling;
    options.sampling.params.seed = seed;
    options.constraint = request.constraint.get();
    Keep keep;
    return generate(runner_, request.prompt, options, keep, nullptr).ids;
  }

  PagedBudget budget_{4, 2000};  // of few: sequences are preempted
  HashRunner runner_{8, 100, budget_, {}, 1};
  WaitingRoom room_{{}};
  StillClock clock_;
  RequestId last_id_ = 0;
};

TEST_F(ConstraintTest, ManyAreHeldEachToItsOwn) {
  const auto held = std::make_shared<BinarySource>();
  std::vector<Request> requests;
  for (int32_t i = 0; i < 12; ++i) {
    requests.push_back(request(i, 40, i % 3 == 0 ? nullptr : held));
    if (i % 4 == 1) requests.back().num_choices = 3;
    if (i % 4 == 2) requests.back().sampling.params.presence_penalty = 1;
  }
  const auto sinks = run(requests, 400);
  for (size_t i = 0; i < requests.size(); ++i) {
    for (size_t c = 0; c < sinks[i]->ids.size(); ++c) {
      ASSERT_EQ(sinks[i]->ids[c].size(), 40u);
      EXPECT_EQ(sinks[i]->ids[c], alone(requests[i], 7 + c)) << i;
      for (size_t t = 1; t < 40 && requests[i].constraint != nullptr; ++t) {
        const int32_t last = sinks[i]->ids[c][t - 1], id = sinks[i]->ids[c][t];
        ASSERT_TRUE(id == Binary::child(last, 1) || id == Binary::child(last, 2)) << i << " " << t;
      }
    }
  }
}

TEST_F(ConstraintTest, EndsWhereItSaysSo) {
  const auto sinks = run({request(1, 40, std::make_shared<BinarySource>(5))});
  EXPECT_EQ(sinks[0]->ids[0].size(), 5u);
  EXPECT_EQ(sinks[0]->outcome.reasons[0], FinishReason::kEndOfText);
  EXPECT_EQ(alone(request(1, 40, std::make_shared<BinarySource>(5)), 7), sinks[0]->ids[0]);
}

// As if the request named the mask; whether drawn in the step, or after it, as with penalties and several choices.
TEST_F(ConstraintTest, MasksOfOthersNeedNoAsking) {
  const std::vector<int32_t> free = alone(request(1, 40, nullptr), 7);
  const auto mask = std::make_shared<std::vector<uint32_t>>(mask_without(free[3], kHashVocab));
  std::vector<Request> requests;
  for (const int64_t most : {40, 0, 4}) requests.push_back(request(1, 40, std::make_shared<SharedSource>(mask, most)));
  for (int i = 0; i < 2; ++i) {
    requests.push_back(requests[0]);
    requests.back().num_choices = 2;
    requests.back().sampling.params.presence_penalty = 1;
    if (i == 1) requests.back().constraint = nullptr, requests.back().allowed = mask;
  }
  requests.push_back(request(1, 40, nullptr));
  requests.back().allowed = mask;
  const auto sinks = run(requests);
  const std::vector<int32_t>& held = sinks[0]->ids[0];
  EXPECT_EQ(held, sinks[5]->ids[0]);
  EXPECT_EQ(std::count(held.begin(), held.end(), free[3]), 0);
  EXPECT_EQ(sinks[1]->ids[0], free);
  EXPECT_TRUE(std::equal(held.begin(), held.begin() + 4, sinks[2]->ids[0].begin()));
  EXPECT_EQ(sinks[3]->ids, sinks[4]->ids);
}

TEST_F(ConstraintTest, NoTokenAllowedFailsItsRequestAlone) {
  for (const int64_t none_after : {0, 1, 6}) {
    std::vector<Request> requests = {request(1, 40, std::make_shared<BinarySource>(-1, none_after)),
                                     request(2, 40, std::make_shared<BinarySource>())};
    requests.push_back(requests[0]);
    requests.back().num_choices = 2;  // drawn after the step
    const auto sinks = run(requests);
    for (const size_t i : {0, 2}) {
      EXPECT_EQ(sinks[i]->ids[0].size(), static_cast<size_t>(none_after));
      EXPECT_EQ(sinks[i]->outcome.reasons[0], FinishReason::kFailed);
      EXPECT_EQ(sinks[i]->outcome.error_code, ErrorCode::kInvalidArgument);
      EXPECT_NE(sinks[i]->outcome.error.find("allows no token"), std::string::npos);
    }
    EXPECT_EQ(sinks[1]->ids[0].size(), 40u);
  }
  EXPECT_EQ(runner_.num_states(), 0);
}

}  // namespace
}  // namespace tessera::engine
