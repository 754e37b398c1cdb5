// SPDX-License-Identifier: Apache-2.0
// What `tessera verify` runs of the maps and experts in a4 on a B200 and on an RTX PRO 6000, both emulated: every
// kernel of few tokens and of many agrees, and products whose sums are one value are exact.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backends/registry.h"
#include "device/cuda/emulated/capability.h"
#include "testing/gpu_stage.h"
#include "testing/seed.h"
#include "verify/verify.h"

namespace tessera {
namespace {

struct Blackwell {
  const char* backend;
  int compute_major;
};

class SlowEmulatedVerify : public ::testing::TestWithParam<Blackwell> {
 protected:
  SlowEmulatedVerify() { device::emulated::set_compute_capability(GetParam().compute_major, 0); }
  ~SlowEmulatedVerify() override { device::emulated::set_compute_capability(9, 0); }
};

TEST_P(SlowEmulatedVerify, EveryCallOfMapsAndExpertsAgrees) {
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::vector<const ops::Backend*> backends;
  for (const ops::Backend* backend : backends::all_backends()) {
    const std::string name = backend->name;
    if (name == GetParam().backend || name == "ref") backends.push_back(backend);
  }
  ASSERT_EQ(backends.size(), 2u);
  std::string why_not;
  device::Machine machine = device::probe_machine();
  machine.gpu = testing::find_test_gpu(why_not);
  for (const char* op : {"linear", "moe_experts"}) {
    const verify::Report report =
        verify::verify(backends, machine, {.seed = seed, .is_quick = true, .op = op, .num_threads = 2}, nullptr);
    ASSERT_EQ(report.rows.size(), 1u) << op;
    const verify::Row& row = report.rows[0];
    EXPECT_THAT(row.variant, ::testing::StartsWith(std::string(GetParam().backend) + "."));
    for (const verify::Failure& failure : row.failures) ADD_FAILURE() << failure.shape << ": " << failure.what;
    int num_exact = 0;
    for (const verify::Call& call : row.calls) {
      if (call.shape.find("one weight a row") != std::string::npos && call.num_values > 0) ++num_exact;
    }
    EXPECT_EQ(num_exact, 3) << op;
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, SlowEmulatedVerify, ::testing::Values(Blackwell{"sm100", 10}, Blackwell{"sm120", 12}),
                         [](const auto& test) { return std::string(test.param.backend); });

}  // namespace
}  // namespace tessera
