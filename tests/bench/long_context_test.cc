// SPDX-License-Identifier: Apache-2.0
// Long contexts, where indices outgrow small types and choices are made among many entries: a token behind 131,072 and
// 1,048,448 others, whose cache entries are random, gets the reference's logits from the best CPU variants and, where
// there is a GPU, from it. Every kind of layer takes part.
#include <gtest/gtest.h>

#include <cmath>
#include <optional>

#include "backends/registry.h"
#include "bench/shapes/published.h"
#include "bench/synthetic/random_caches.h"
#include "bench/synthetic/synthetic_weights.h"
#include "device/gpu_executor.h"
#include "model/model.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

constexpr uint64_t kSeed = 11;

// Logits of a few tokens one by one from `position` on, in f32 with FP8 caches: nothing but caches is rounded, so a
// choice hangs on the last bits only where scores are as good as equal.
std::vector<float> logits_at(int64_t position, const device::Machine& machine) {
  const model::Config config = bench::with_layers(bench::published_config("small"), 4);
  EXPECT_EQ(config.compress_ratios, (std::vector<int64_t>{0, 4, 128, 4}));
  bench::SyntheticWeights weights(config, kSeed, 2);
  ops::Planner planner(backends::all_backends(), machine);
  constexpr int64_t kTokens = 3;
  model::Model model(config, planner, weights, {ops::InputMode::kF32, ops::CacheMode::kFp8}, 0, kTokens,
                     device::make_executor(machine, 2), {});
  const auto state = model.new_sequence(position + kTokens);
  bench::fill_caches(*state, position, kSeed);
  std::vector<float> logits;
  for (int32_t t = 0; t < kTokens; ++t) {
    const int32_t id = 7 + 50 * t;
    const model::SequenceSlice slice{state.get(), {&id, 1}, model::LogitRows::kLast};
    const TensorView row = model.step({&slice, 1});
    logits.insert(logits.end(), row.as<float>(), row.as<float>() + row.shape.num_elements());
  }
  return logits;
}

void check(int64_t position) {
  device::Machine reference = device::probe_machine(), best = reference;
  reference.backends = "ref";
  const std::vector<float> expected = logits_at(position, reference);
  EXPECT_TRUE(testing::is_close(logits_at(position, best), expected, 1e-4)) << "best CPU variants at " << position;
  std::string why_not;
  best.gpu = device::find_gpu(0, why_not);
  if (!best.gpu.has_value()) {
    std::printf("no GPU: %s\n", why_not.c_str());
    return;
  }
  EXPECT_TRUE(testing::is_close(logits_at(position, best), expected, 1e-4)) << "GPU at " << position;
}

TEST(LongContext, At128K) {
  check(131072);
}

TEST(SlowLongContext, At1M) {
  check(1048448);
}

}  // namespace
}  // namespace tessera
