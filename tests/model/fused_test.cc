// SPDX-License-Identifier: Apache-2.0
// A model with fused ops has the bits of one without.
#include <gtest/gtest.h>

#include "model/model_helpers.h"
#include "testing/compare.h"
#include "testing/goldens.h"
#include "testing/seed.h"

namespace tessera {
namespace {

TEST(Fused, ChangesNoBit) {
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Rng rng(seed);
  device::Machine machine = testing::test_machine();
  machine.gpu.reset();
  machine.backends = "ref";  // it has every fused op
  for (const ops::Precision precision :
       {ops::Precision{ops::InputMode::kA16, ops::CacheMode::kFp8}, {ops::InputMode::kF32, ops::CacheMode::kExact}}) {
    const auto with = testing::load_fused(testing::tiny_model(), precision, machine, true),
               without = testing::load_fused(testing::tiny_model(), precision, machine, false);
    EXPECT_GT(testing::num_fused(with), 5 * with.config.num_layers);
    EXPECT_EQ(testing::num_fused(without), 0);
    const std::vector<int32_t> ids = testing::random_ids(rng, 140, with.runner->facts().vocab_size);
    const auto logits_of = [&](const model::LoadedModel& loaded) {
      const auto state = loaded.runner->new_sequence(140);
      std::vector<float> logits =
          testing::feed(*loaded.runner, *state, std::span(ids).first(133), model::LogitRows::kAll);
      const std::vector<float> rest =
          testing::feed(*loaded.runner, *state, std::span(ids).subspan(133), model::LogitRows::kAll, 1);
      logits.insert(logits.end(), rest.begin(), rest.end());
      return logits;
    };
    EXPECT_TRUE(testing::same_bits(logits_of(with), logits_of(without)));
  }
}

// On processors the faster kernels compute the parts, one by one.
TEST(Fused, IsNotTakenFromASlowerBackend) {
  device::Machine machine = testing::test_machine();
  machine.gpu.reset();
  const auto loaded = testing::load_fused(testing::tiny_model(), {}, machine, true);
  for (const ops::PlanLine& line : loaded.plan) {
    if (line.op != ops::RmsNorm::kName) continue;
    if (line.chosen.starts_with("ref.")) GTEST_SKIP() << "this machine has the reference alone";
  }
  EXPECT_EQ(testing::num_fused(loaded), 0);
}

}  // namespace
}  // namespace tessera
