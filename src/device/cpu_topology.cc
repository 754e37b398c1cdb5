// SPDX-License-Identifier: Apache-2.0
#include "device/cpu_topology.h"

#include <fmt/format.h>
#include <hwloc.h>

#include <algorithm>
#include <map>
#include <set>
#include <thread>
#include <tuple>

#include "base/env.h"
#include "base/error.h"
#include "base/strings.h"
#include "device/hwloc_topology.h"
#include "device/thread_affinity.h"

namespace tessera::device {

namespace {

// The node with the fewest processors around this one, hence the nearest, among those that have memory; -1 without any.
// Of several equally near ones (DRAM, then memory on the package or behind a bus) the first is DRAM.
int near_node(hwloc_topology_t topology, unsigned os_index) {
  int best = -1, best_weight = 0;
  hwloc_obj_t node = nullptr;
  while ((node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node)) != nullptr) {
    if (!hwloc_bitmap_isset(node->cpuset, os_index) || node->attr->numanode.local_memory == 0) continue;
    const int weight = hwloc_bitmap_weight(node->cpuset), index = static_cast<int>(node->os_index);
    if (best < 0 || std::tie(weight, index) < std::tie(best_weight, best)) best = index, best_weight = weight;
  }
  return best;
}

std::vector<Processor> all_processors(hwloc_topology_t topology) {
  std::vector<Processor> processors;
  hwloc_obj_t unit = nullptr;
  while ((unit = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_PU, unit)) != nullptr) {
    const hwloc_obj_t core = hwloc_get_ancestor_obj_by_type(topology, HWLOC_OBJ_CORE, unit);
    Processor processor;
    processor.os_index = static_cast<int>(unit->os_index);
    processor.core = static_cast<int>(core != nullptr ? core->logical_index : unit->logical_index);
    processor.node = near_node(topology, unit->os_index);
    processors.push_back(processor);
  }
  return processors;
}

// Siblings are counted among the usable ones, so that a core of which only the second thread may be used is a core.
void sort_by_use(std::vector<Processor>& processors) {
  std::map<int, int> siblings, cores_of_node;
  std::map<int, int> rank;  // of a core within its node
  for (Processor& processor : processors) {
    processor.sibling = siblings[processor.core]++;
    if (processor.sibling == 0) rank[processor.core] = cores_of_node[processor.node]++;
  }
  std::stable_sort(processors.begin(), processors.end(), [&](const Processor& a, const Processor& b) {
    return std::tuple(a.sibling, rank[a.core], a.node) < std::tuple(b.sibling, rank[b.core], b.node);
  });
}

}  // namespace

CpuTopology probe_cpu_topology(const std::string& synthetic) {
  CpuTopology found;
  if (const HwlocTopology topology = load_hwloc_topology(synthetic)) {
    found.is_imagined = hwloc_topology_is_thissystem(topology.get()) == 0;
    found.processors = all_processors(topology.get());
  }
  if (!found.is_imagined) {
    const std::vector<int> usable = unpinned_affinity();
    const auto removed = std::erase_if(found.processors, [&](const Processor& processor) {
      return !std::binary_search(usable.begin(), usable.end(), processor.os_index);
    });
    found.is_restricted = removed > 0;
    if (found.processors.empty()) {  // hwloc knows nothing of this machine
      found.is_restricted = false;
      for (const int index : usable) found.processors.push_back({index, index, 0, 0});
    }
    if (found.processors.empty()) found.processors.push_back({});
  }
  sort_by_use(found.processors);
  std::set<int> nodes;
  for (const Processor& processor : found.processors) {
    if (processor.node >= 0) nodes.insert(processor.node);
  }
  found.nodes.assign(nodes.begin(), nodes.end());
  found.num_cores = static_cast<int>(std::count_if(found.processors.begin(), found.processors.end(),
                                                   [](const Processor& processor) { return processor.sibling == 0; }));
  return found;
}

PlacementSetting placement_setting() {
  const std::string value = env_value("TESSERA_PLACEMENT").value_or("auto");
  if (value == "auto") return PlacementSetting::kAuto;
  if (value == "on") return PlacementSetting::kOn;
  if (value == "off") return PlacementSetting::kOff;
  fail(ErrorCode::kInvalidArgument,
       fmt::format("TESSERA_PLACEMENT: expected auto, on or off, found \"{}\"", printable(value, 40)));
}

PinPlan plan_pins(const CpuTopology& topology, int num_threads, int num_usable_cores, PlacementSetting setting) {
  const int num_processors = static_cast<int>(topology.processors.size());
  if (setting == PlacementSetting::kOff) return {{}, "TESSERA_PLACEMENT is off"};
  if (num_threads > num_processors) return {{}, "more threads than processors"};
  if (setting == PlacementSetting::kAuto) {
    if (topology.is_restricted) return {{}, "this process was given some of the processors"};
    if (num_usable_cores < num_processors) return {{}, "a control group limits processor time"};
    if (num_threads < topology.num_cores) return {{}, "fewer threads than cores"};
  }
  PinPlan plan;
  for (int i = 0; i < num_threads; ++i) {
    const Processor& mine = topology.processors[static_cast<size_t>(i)];
    std::vector<int>& place = plan.places.emplace_back(1, mine.os_index);
    // Two programs with a thread for each core then share cores, and not the same half of each.
    if (num_threads > topology.num_cores) continue;
    for (const Processor& other : topology.processors) {
      if (other.core == mine.core && other.os_index != mine.os_index) place.push_back(other.os_index);
    }
  }
  return plan;
}

std::vector<int> nodes_to_interleave(const CpuTopology& topology, PlacementSetting setting) {
  if (setting == PlacementSetting::kOff || topology.nodes.size() < 2) return {};
  return topology.nodes;
}

}  // namespace tessera::device
