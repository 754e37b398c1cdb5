// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which processors this process may use, on which cores and memory nodes they are, and which thread goes where.
// Found with hwloc; nothing here changes how anything runs (thread_affinity.h and memory_interleaving.h do).
#include <string>
#include <vector>

namespace tessera::device {

// What the system schedules on: a core, or one of the hardware threads that share it.
struct Processor {
  int os_index = 0;  // its number in affinity masks
  int core = 0;      // processors with the same number share a core
  int sibling = 0;   // 0 for the first processor of its core
  int node = 0;      // the system's number of the memory node that is near

  bool operator==(const Processor&) const = default;
};

struct CpuTopology {
  // Those that this process may use, in the order in which threads take them: one of each core before the siblings,
  // nodes in turn, so that few threads reach the memory of all nodes. Never empty.
  std::vector<Processor> processors;
  int num_cores = 1;       // with a processor in the list
  std::vector<int> nodes;  // near to a processor in the list, ascending; those without memory left out
  bool is_restricted =
      false;  // somebody narrowed the affinity of this process (taskset, numactl) inside its control group
  bool is_imagined = false;  // described by HWLOC_SYNTHETIC or by `synthetic`, not this machine
};

// `synthetic` describes an imagined machine in hwloc's words ("pack:2 node:1 core:4 pu:2"), for tests; empty: this
// machine. Takes about a millisecond. Where hwloc can't tell, every processor is a core of node 0. Throws
// kInvalidArgument for words that hwloc refuses.
CpuTopology probe_cpu_topology(const std::string& synthetic = "");

enum class PlacementSetting { kAuto, kOn, kOff };

// TESSERA_PLACEMENT: auto, on or off; throws kInvalidArgument for others.
PlacementSetting placement_setting();

// Where a team of threads goes.
struct PinPlan {
  // Of each thread, the caller of the team's loops first: the os_index of the processors on which it is held. Empty:
  // nobody is pinned.
  std::vector<std::vector<int>> places;
  std::string why_not;  // why nobody is, for people
};

// A core of its own for each thread, whose processors the system may choose among; where threads outnumber cores, a
// processor of its own; where they outnumber processors, nobody is pinned. kAuto pins only a team that has the machine
// to itself: at least one thread per core, an affinity that nobody narrowed, and no share of processor time
// (`num_usable_cores` below the number of processors), because two pinned programs that each leave cores to the other
// would take the same ones. kOn pins inside what was narrowed too.
PinPlan plan_pins(const CpuTopology& topology, int num_threads, int num_usable_cores, PlacementSetting setting);

// The nodes over which pages of weights and caches are dealt out: all of `topology`; none where there is only one
// or the setting is kOff.
std::vector<int> nodes_to_interleave(const CpuTopology& topology, PlacementSetting setting);

}  // namespace tessera::device
