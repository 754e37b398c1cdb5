// SPDX-License-Identifier: Apache-2.0
// Which thread goes where, on imagined machines (hwloc's synthetic topologies), and that threads of this one go there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hwloc.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "base/error.h"
#include "device/buffer.h"
#include "device/cpu_placement.h"
#include "device/hwloc_topology.h"
#include "device/machine.h"
#include "device/queue.h"
#include "testing/seed.h"

namespace tessera::device {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr auto kAuto = PlacementSetting::kAuto, kOn = PlacementSetting::kOn, kOff = PlacementSetting::kOff;

std::vector<int> order_of(const CpuTopology& topology) {
  std::vector<int> order;
  for (const Processor& processor : topology.processors) order.push_back(processor.os_index);
  return order;
}

TEST(Placement, TakesCoresBeforeSiblingsAndNodesInTurn) {
  // Siblings are neighbours: 0 1 on core 0, and so on.
  const CpuTopology two = probe_cpu_topology("pack:2 [numa(memory=1GB)] core:2 pu:2");
  EXPECT_THAT(order_of(two), ElementsAre(0, 4, 2, 6, 1, 5, 3, 7));
  EXPECT_EQ(two.num_cores, 4);
  EXPECT_THAT(two.nodes, ElementsAre(0, 1));
  EXPECT_TRUE(two.is_imagined);
  EXPECT_FALSE(two.is_restricted);
  EXPECT_EQ(two.processors[1], (Processor{4, 2, 0, 1}));

  const CpuTopology flat = probe_cpu_topology("core:3 pu:1");
  EXPECT_THAT(order_of(flat), ElementsAre(0, 1, 2));
  EXPECT_THAT(flat.nodes, ElementsAre(0));

  // Numbered as most servers are: all first siblings, then all second ones.
  EXPECT_THAT(order_of(probe_cpu_topology("pack:2 [numa(memory=1GB)] core:2 pu:2(indexes=0,4,1,5,2,6,3,7)")),
              ElementsAre(0, 2, 1, 3, 4, 6, 5, 7));

  // Four nodes on two sockets, one core each.
  EXPECT_THAT(order_of(probe_cpu_topology("pack:2 group:2 [numa(memory=1GB)] core:1 pu:2")),
              ElementsAre(0, 2, 4, 6, 1, 3, 5, 7));
}

TEST(Placement, PrefersTheNearestNode) {
  // Each socket's own memory, and memory that both reach: nobody is near to the latter.
  const CpuTopology topology =
      probe_cpu_topology("[numa(memory=1GB indexes=2)] pack:2 [numa(memory=1GB indexes=0,1)] core:1 pu:1");
  EXPECT_THAT(topology.nodes, ElementsAre(0, 1));
  // Two kinds of memory in the same socket: the first is DRAM.
  EXPECT_EQ(probe_cpu_topology("pack:2 [numa(memory=1GB)] [numa(memory=1GB)] core:2 pu:1").nodes.size(), 2u);
}

// Whatever the machine: every processor once, no sibling before the last core, nodes as even as they can be among
// cores.
TEST(Placement, KeepsItsPromisesOnRandomMachines) {
  const unsigned seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::minstd_rand rng(seed);
  for (int trial = 0; trial < 40; ++trial) {
    const int packs = 1 + static_cast<int>(rng() % 4), cores = 1 + static_cast<int>(rng() % 6);
    const int units = 1 + static_cast<int>(rng() % 3);
    const std::string words = "pack:" + std::to_string(packs) + " [numa(memory=1GB)] core:" + std::to_string(cores) +
                              " pu:" + std::to_string(units);
    SCOPED_TRACE(words);
    const CpuTopology topology = probe_cpu_topology(words);
    ASSERT_EQ(topology.processors.size(), static_cast<size_t>(packs * cores * units));
    ASSERT_EQ(topology.num_cores, packs * cores);
    std::set<int> seen;
    int sibling = 0;
    ASSERT_EQ(topology.nodes.size(), static_cast<size_t>(packs));
    std::vector<int> of_node(static_cast<size_t>(packs));
    for (const Processor& processor : topology.processors) {
      EXPECT_TRUE(seen.insert(processor.os_index).second);
      EXPECT_GE(processor.sibling, sibling);
      sibling = processor.sibling;
      ++of_node.at(static_cast<size_t>(processor.node));
      const auto [least, most] = std::minmax_element(of_node.begin(), of_node.end());
      EXPECT_LE(*most - *least, 1);
    }
    const int threads = 1 + static_cast<int>(rng() % (static_cast<unsigned>(packs * cores * units) + 2));
    const PinPlan plan = plan_pins(topology, threads, packs * cores * units, kOn);
    EXPECT_EQ(plan.places.size(), threads > packs * cores * units ? 0u : static_cast<size_t>(threads));
    EXPECT_EQ(plan.places.empty(), !plan.why_not.empty());
    // Whole cores up to one thread for each, then single processors; nobody's twice.
    std::set<int> held;
    for (const std::vector<int>& place : plan.places) {
      EXPECT_EQ(place.size(), threads <= packs * cores ? static_cast<size_t>(units) : 1u);
      for (const int processor : place) EXPECT_TRUE(held.insert(processor).second) << processor;
    }
  }
}

TEST(Placement, PinsOnlyATeamThatHasTheMachine) {
  CpuTopology topology = probe_cpu_topology("pack:2 [numa(memory=1GB)] core:2 pu:2");
  const auto core = [](int first) { return ElementsAre(first, first + 1); };
  EXPECT_THAT(plan_pins(topology, 4, 8, kAuto).places, ElementsAre(core(0), core(4), core(2), core(6)));
  const auto one = [](int processor) { return ElementsAre(processor); };
  EXPECT_THAT(plan_pins(topology, 5, 8, kAuto).places, ElementsAre(one(0), one(4), one(2), one(6), one(1)));
  EXPECT_THAT(plan_pins(topology, 8, 8, kAuto).places,
              ElementsAre(one(0), one(4), one(2), one(6), one(1), one(5), one(3), one(7)));
  EXPECT_THAT(plan_pins(probe_cpu_topology("core:2 pu:1"), 2, 2, kAuto).places, ElementsAre(one(0), one(1)));
  const auto refusal = [&](int threads, int usable, PlacementSetting setting) {
    const PinPlan plan = plan_pins(topology, threads, usable, setting);
    EXPECT_THAT(plan.places, IsEmpty());
    return plan.why_not;
  };
  EXPECT_THAT(refusal(9, 8, kAuto), HasSubstr("more threads than processors"));
  EXPECT_THAT(refusal(9, 8, kOn), HasSubstr("more threads than processors"));
  EXPECT_THAT(refusal(3, 8, kAuto), HasSubstr("fewer threads than cores"));
  EXPECT_THAT(refusal(4, 4, kAuto), HasSubstr("control group"));
  EXPECT_THAT(refusal(8, 8, kOff), HasSubstr("off"));
  topology.is_restricted = true;
  EXPECT_THAT(refusal(8, 8, kAuto), HasSubstr("given some of the processors"));
  EXPECT_THAT(plan_pins(topology, 3, 2, kOn).places, ElementsAre(core(0), core(4), core(2)));
  EXPECT_THAT(nodes_to_interleave(topology, kAuto), ElementsAre(0, 1));
  EXPECT_THAT(nodes_to_interleave(topology, kOff), IsEmpty());
  EXPECT_THAT(nodes_to_interleave(probe_cpu_topology("core:8 pu:1"), kOn), IsEmpty());
}

TEST(Placement, NamesWordsThatItCanNotRead) {
  EXPECT_THROW(probe_cpu_topology("pack:x"), Error);
  // A node without memory is nobody's.
  EXPECT_THAT(probe_cpu_topology("pack:2 [numa(memory=0)] core:2 pu:1").nodes, IsEmpty());
}

// The environment of this test alone: ctest runs every test in a process of its own.
struct Setting {
  explicit Setting(const char* value) { setenv("TESSERA_PLACEMENT", value, 1); }
  ~Setting() { unsetenv("TESSERA_PLACEMENT"); }
};

TEST(Placement, ReadsItsVariable) {
  {
    const Setting setting("off");
    const CpuPlacement placement;
    EXPECT_THAT(placement.pins(0).why_not, HasSubstr("TESSERA_PLACEMENT"));
    EXPECT_FALSE(placement.interleave().is_active());
  }
  {
    const Setting setting("ON");
    EXPECT_THROW(CpuPlacement(), Error);
  }
  const Setting setting("on");
  const CpuPlacement placement;
  EXPECT_EQ(placement.pins(1).places.size(), 1u);
}

TEST(Placement, SeesWhatThisProcessMayUse) {
  const std::vector<int> before = unpinned_affinity();
  const CpuTopology topology = probe_cpu_topology();
  EXPECT_EQ(topology.processors.size(), before.size());
  EXPECT_LE(topology.num_cores, static_cast<int>(before.size()));
  if (before.size() < 2) GTEST_SKIP() << "one processor";
  // A thread that the user confined sees its part only, and says that it was confined.
  std::thread([&] {
    ASSERT_TRUE(set_affinity({before.back()}));
    const CpuTopology part = probe_cpu_topology();
    EXPECT_THAT(order_of(part), ElementsAre(before.back()));
    EXPECT_TRUE(part.is_restricted);
    EXPECT_EQ(usable_cores(), 1);
    EXPECT_THAT(plan_pins(part, 1, 1, kAuto).places, IsEmpty());
  }).join();
}

// The mask of each thread of a team: every thread takes one part and waits for the others.
std::vector<std::vector<int>> masks_of_team(ThreadPool& pool) {
  std::vector<std::vector<int>> masks;
  std::mutex lock;
  std::atomic<int> num_inside = 0;
  const auto record = [&](int64_t, int64_t) {
    std::vector<int> mask;
    cpu_set_t set;
    CPU_ZERO(&set);
    EXPECT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
    for (int i = 0; i < CPU_SETSIZE; ++i) {
      if (CPU_ISSET(static_cast<size_t>(i), &set)) mask.push_back(i);
    }
    const std::lock_guard<std::mutex> hold(lock);
    masks.push_back(mask);
    ++num_inside;
  };
  const auto wait_for_all = [&](int64_t begin, int64_t end) {
    record(begin, end);
    while (num_inside < pool.num_threads()) std::this_thread::yield();
  };
  pool.run(pool.num_threads(), pool.num_threads(), wait_for_all);
  std::sort(masks.begin(), masks.end());
  return masks;
}

TEST(ThreadPool, HoldsEachThreadWhereAsked) {
  const std::vector<int> before = unpinned_affinity();
  if (before.size() < 2) GTEST_SKIP() << "one processor";
  const std::vector<std::vector<int>> two = {{before[1]}, {before[0]}};
  {
    ThreadPool pool(2, two);
    EXPECT_FALSE(ThreadPin::is_caller_pinned()) << "not before the first loop";
    EXPECT_THAT(masks_of_team(pool), ElementsAre(ElementsAre(before[0]), ElementsAre(before[1])));
    EXPECT_TRUE(ThreadPin::is_caller_pinned());
    EXPECT_EQ(unpinned_affinity(), before);
    EXPECT_EQ(probe_cpu_topology().processors.size(), before.size()) << "a pin is no wish of the user";
    // Threads of another team don't inherit the caller's one processor.
    ThreadPool free(2);
    EXPECT_THAT(masks_of_team(free), ElementsAre(before, two.front()));
    // The caller's pin is shared, and lasts as long as one of its teams.
    auto nested = std::make_unique<ThreadPool>(2, two);
    masks_of_team(*nested);
    nested.reset();
    EXPECT_TRUE(ThreadPin::is_caller_pinned());
    // Another caller is held in turn, and the first is free again.
    std::thread([&] {
      masks_of_team(pool);
      EXPECT_TRUE(ThreadPin::is_caller_pinned());
    }).join();
    EXPECT_FALSE(ThreadPin::is_caller_pinned());
    EXPECT_THAT(masks_of_team(pool), ElementsAre(ElementsAre(before[0]), ElementsAre(before[1])));
  }
  EXPECT_FALSE(ThreadPin::is_caller_pinned());
  ThreadPool after(1);
  EXPECT_THAT(masks_of_team(after), ElementsAre(before));
}

// Ended on another thread than its caller's, as by an owner that outlives a server's thread.
TEST(ThreadPool, FreesItsCallerFromAnotherThread) {
  const std::vector<int> before = unpinned_affinity();
  if (before.size() < 2) GTEST_SKIP() << "one processor";
  auto pool = std::make_unique<ThreadPool>(2, std::vector<std::vector<int>>{{before[0]}, {before[1]}});
  masks_of_team(*pool);
  std::thread([&] { pool.reset(); }).join();
  EXPECT_FALSE(ThreadPin::is_caller_pinned());
  ThreadPool after(1);
  EXPECT_THAT(masks_of_team(after), ElementsAre(before));
}

TEST(ThreadPool, MayHoldAThreadOnSeveralProcessors) {
  const std::vector<int> all = unpinned_affinity();
  if (all.size() < 2) GTEST_SKIP() << "one processor";
  const std::vector<std::vector<int>> places = {{all[0], all[1]}, {all[1]}};
  ThreadPool pool(2, places);
  EXPECT_THAT(masks_of_team(pool), testing::UnorderedElementsAreArray(places));
}

// The system gives the number of a thread that has ended to another one, which a pin must leave alone.
TEST(ThreadPool, LeavesAThreadAloneThatGotItsCallersNumber) {
  const std::vector<int> before = unpinned_affinity();
  if (before.size() < 2) GTEST_SKIP() << "one processor";
  int64_t numbers = 0;
  if (!(std::ifstream("/proc/sys/kernel/pid_max") >> numbers) || numbers > 1 << 16) {
    GTEST_SKIP() << "too many numbers to wait for one to come again";
  }
  const auto number = [] { return syscall(SYS_gettid); };
  auto pool = std::make_unique<ThreadPool>(2, std::vector<std::vector<int>>{{before[0]}, {before[1]}});
  int64_t ended = 0;
  std::thread([&] {
    masks_of_team(*pool);
    ended = number();
  }).join();
  bool is_seen = false;
  for (int64_t i = 0; i < 3 * numbers && !is_seen; ++i) {
    std::thread([&] {
      if (number() != ended) return;
      is_seen = true;
      ASSERT_TRUE(set_affinity({before[1]}));
      std::thread([&] { pool.reset(); }).join();
      EXPECT_THAT(unpinned_affinity(), ElementsAre(before[1]));
    }).join();
  }
  if (!is_seen) GTEST_SKIP() << "the number did not come again";
}

TEST(InterleavedMemory, DealsPagesOutOverNodes) {
  const CpuPlacement placement;
  std::optional<InterleavedMemory> scope(placement.interleave());
  if (placement.topology().nodes.size() < 2) {
    EXPECT_FALSE(scope->is_active());
    EXPECT_THAT(placement.interleaved_nodes(), IsEmpty());
    GTEST_SKIP() << "one memory node";
  }
  if (!scope->is_active()) GTEST_SKIP() << "the system or the user chose otherwise";
  const Buffer buffer(size_t{64} << 20);
  scope.reset();
  std::thread([&] { std::fill_n(buffer.as<char>(), buffer.size(), 'x'); }).join();  // as threads that pack weights
  const HwlocTopology topology = load_hwloc_topology();
  std::set<unsigned> nodes;
  hwloc_bitmap_t set = hwloc_bitmap_alloc();
  for (size_t at = 0; at < buffer.size(); at += size_t{2} << 20) {
    ASSERT_EQ(hwloc_get_area_memlocation(topology.get(), buffer.as<char>() + at, 4096, set, HWLOC_MEMBIND_BYNODESET),
              0);
    nodes.insert(static_cast<unsigned>(hwloc_bitmap_first(set)));
  }
  hwloc_bitmap_free(set);
  EXPECT_EQ(nodes.size(), placement.topology().nodes.size());
}

}  // namespace
}  // namespace tessera::device
