// SPDX-License-Identifier: Apache-2.0
// A model that has reserved its caches takes no more memory of the GPU, however many sequences and snapshots there are.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "model/model_helpers.h"
#include "testing/generated_model.h"
#include "testing/seed.h"
#include "testing/temporary_folder.h"

namespace tessera {
namespace {

uint64_t bytes_held() {
  cudaMemPool_t pool = nullptr;
  uint64_t bytes = 0;
  EXPECT_EQ(cudaDeviceGetDefaultMemPool(&pool, 0), cudaSuccess);
  EXPECT_EQ(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &bytes), cudaSuccess);
  return bytes;
}

TEST(ReservedMemory, IsAllThatSequencesTake) {
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  constexpr int64_t kTokens = 40;
  constexpr size_t kSequences = 3;
  const testing::TemporaryFolder folder;
  testing::write_generated_model(testing::smallest_config(), folder.path());
  setenv("TESSERA_DEVICE", "cuda:0", 1);
  const model::LoadedModel loaded = testing::load(folder.path(), ops::InputMode::kA16, ops::CacheMode::kExact, 1, 16);
  model::Runner& runner = *loaded.runner;
  const model::CacheSpec& spec = runner.cache_spec();
  const std::vector<int32_t> ids = testing::random_ids(rng, kTokens, runner.facts().vocab_size);
  const auto run = [&](size_t count) {
    std::vector<std::unique_ptr<model::SequenceState>> states;
    std::vector<std::unique_ptr<model::StateSnapshot>> snapshots;
    for (size_t i = 0; i < count; ++i) {
      states.push_back(runner.new_sequence(kTokens));
      for (size_t begin = 0; begin < ids.size(); begin += 8) {
        testing::feed(runner, *states.back(), std::span(ids).subspan(begin, 8), model::LogitRows::kLast);
      }
      snapshots.push_back(states.back()->snapshot());
    }
  };
  run(1);  // what grows with the longest sequence and step
  const uint64_t before = bytes_held();
  const auto bytes = static_cast<int64_t>(kSequences) * (spec.bytes(kTokens) + spec.snapshot_bytes + spec.page_bytes);
  runner.reserve({.running = bytes});
  const uint64_t reserved = bytes_held();
  EXPECT_GT(reserved, before);
  run(kSequences);
  EXPECT_EQ(bytes_held(), reserved);
}

}  // namespace
}  // namespace tessera
