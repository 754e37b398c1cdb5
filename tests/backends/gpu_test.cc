// SPDX-License-Identifier: Apache-2.0
// On a machine with a GPU the other tests of this program run the GPU's variants too. This says whether they did.
#include <gtest/gtest.h>

#include "testing/op_harness.h"

namespace tessera {
namespace {

TEST(Gpu, HasAVariantOfEveryOp) {
  std::string why_not;
  const auto gpu = testing::find_test_gpu(why_not);
  if (!gpu.has_value()) GTEST_SKIP() << why_not;
  std::printf("%s, compute capability %d.%d\n", gpu->name.c_str(), gpu->compute_major, gpu->compute_minor);
  device::Machine machine = device::probe_machine();
  machine.gpu = gpu;
  bool has_every_op = false;
  for (const ops::Backend* backend : backends::all_backends()) {
    if (!ops::is_usable(*backend, machine, why_not)) continue;
    EXPECT_TRUE(backend->is_on_gpu);
    has_every_op |= std::apply([](const auto&... lists) { return (!lists.empty() && ...); }, backend->variants.lists);
  }
  EXPECT_TRUE(has_every_op) << "what an architecture's backend lacks, the portable one has";
}

}  // namespace
}  // namespace tessera
