// SPDX-License-Identifier: Apache-2.0
// The step loop under everything at once, deterministically. TESSERA_SIMULATED_REQUESTS=1000000 makes it a long run;
// TESSERA_SIMULATION_SEED repeats one, TESSERA_SIMULATION_WORLD one world of it; docs/testing.md.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

#include "engine/simulation.h"
#include "testing/seed.h"

namespace tessera::engine {
namespace {

constexpr int64_t kRequests = 10000, kRequestsPerWorld = 1000;

uint64_t number_from(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

TEST(Simulator, KeepsTheContractAfterEachStep) {
  const uint64_t seed = number_from("TESSERA_SIMULATION_SEED", fresh_seed());
  const int64_t num_requests = static_cast<int64_t>(number_from("TESSERA_SIMULATED_REQUESTS", kRequests));
  const uint64_t first = number_from("TESSERA_SIMULATION_WORLD", 0);
  WorldReport all;
  for (uint64_t world = first; all.num_requests < num_requests; ++world) {
    SCOPED_TRACE(testing::Message() << "TESSERA_SIMULATION_SEED=" << seed << " TESSERA_SIMULATION_WORLD=" << world);
    try {
      all.add(run_world(seed, world, kRequestsPerWorld));
    } catch (const std::exception& error) {
      FAIL() << error.what();
    }
    if (std::getenv("TESSERA_SIMULATION_WORLD") != nullptr) break;
  }
  std::cout << all.to_string() << "\n";
  EXPECT_GT(all.num_completed, all.num_requests / 2) << "a simulation in which little ends well tests little";
  EXPECT_GT(all.num_from_host, 0);
  EXPECT_GT(all.num_ahead, 0);
}

TEST(Simulator, IsDeterministic) {
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  const WorldReport once = run_world(seed, 0, 500), again = run_world(seed, 0, 500), other = run_world(seed, 1, 500);
  EXPECT_EQ(once.digest, again.digest);
  EXPECT_EQ(once.num_steps, again.num_steps);
  EXPECT_NE(once.digest, other.digest);
}

}  // namespace
}  // namespace tessera::engine
