// SPDX-License-Identifier: Apache-2.0
// On a machine with a GPU the other tests of this program run the GPU's variants too. This says whether they did.
#include <gtest/gtest.h>

#include <map>

#include "testing/op_harness.h"

namespace tessera {
namespace {

TEST(Gpu, HasAVariantOfEveryOpThatIsNotFused) {
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
    // A fused op is there where it is faster than its parts.
    const auto has_all = []<class... Ops>(const std::span<const ops::Variant<Ops>>&... lists) {
      return ((!lists.empty() || ops::is_fused<Ops>()) && ...);
    };
    has_every_op |= std::apply(has_all, backend->variants.lists);
  }
  EXPECT_TRUE(has_every_op) << "what an architecture's backend lacks, the portable one has";
}

// A build has Blackwell's kernels either for Blackwell or, with its instructions in software, for Hopper.
TEST(Gpu, BlackwellsBackendsAreForOneArchitecture) {
  const std::map<std::string, std::vector<std::pair<int, int>>> targets = {{"sm100", {{10, 0}, {10, 3}}},
                                                                           {"sm120", {{12, 0}, {12, 1}}}};
  for (const ops::Backend* backend : backends::all_backends()) {
    const auto found = targets.find(backend->name);
    if (found == targets.end()) continue;
    std::string why_not;
    const auto takes = [&](int major, int minor) {
      device::Machine machine;
      machine.gpu.emplace(), machine.gpu->compute_major = major, machine.gpu->compute_minor = minor;
      return backend->available(machine, why_not);
    };
    const bool is_in_software = takes(9, 0);
    for (const auto& [major, minor] : found->second) EXPECT_NE(takes(major, minor), is_in_software) << backend->name;
    for (const auto& [major, minor] : {std::pair(8, 0), std::pair(10, 2), std::pair(11, 0), std::pair(12, 2)}) {
      EXPECT_FALSE(takes(major, minor)) << backend->name << " on " << major << "." << minor;
    }
    EXPECT_EQ(why_not.rfind("needs compute capability ", 0), 0u) << why_not;
    EXPECT_NE(why_not.find(", found 12.2"), std::string::npos) << why_not;
  }
}

}  // namespace
}  // namespace tessera
