// SPDX-License-Identifier: Apache-2.0
#pragma once
// hwloc's view of a machine, owned. Private to this room: others see device/cpu_topology.h.
#include <hwloc.h>

#include <memory>
#include <string>

namespace tessera::device {

struct HwlocDestroy {
  void operator()(hwloc_topology_t topology) const { hwloc_topology_destroy(topology); }
};
using HwlocTopology = std::unique_ptr<hwloc_topology, HwlocDestroy>;

// Processors, cores and memory nodes that the control group allows, of this machine or, where it is not empty, of the
// one that `synthetic` describes. Null where hwloc fails; throws kInvalidArgument where it refuses `synthetic`.
HwlocTopology load_hwloc_topology(const std::string& synthetic = "");

}  // namespace tessera::device
