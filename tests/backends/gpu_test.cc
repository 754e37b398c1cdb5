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
  int num_usable = 0;
  for (const ops::Backend* backend : backends::all_backends()) {
    if (!ops::is_usable(*backend, machine, why_not)) continue;
    ++num_usable;
    EXPECT_TRUE(backend->is_on_gpu);
    std::apply([](const auto&... lists) { EXPECT_TRUE((!lists.empty() && ...)); }, backend->variants.lists);
  }
  EXPECT_GT(num_usable, 0);
}

}  // namespace
}  // namespace tessera
