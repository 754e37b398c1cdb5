// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where a model's threads run and where its memory lies: probed once, when the model is built (docs/decisions/
// 0015-cpu-placement.md).
#include <memory>
#include <vector>

#include "device/cpu_topology.h"

struct hwloc_topology;

namespace tessera::device {

// While it lives, pages that the thread which made it touches first are dealt out over memory nodes in turn. Ends on
// the same thread.
class InterleavedMemory {
 public:
  InterleavedMemory();  // leaves memory as it is
  InterleavedMemory(InterleavedMemory&& other) noexcept;
  InterleavedMemory& operator=(InterleavedMemory&&) = delete;
  ~InterleavedMemory();

  bool is_active() const { return topology_ != nullptr; }

 private:
  friend class CpuPlacement;
  explicit InterleavedMemory(hwloc_topology* topology) : topology_(topology) {}

  hwloc_topology* topology_ = nullptr;
};

class CpuPlacement {
 public:
  // Of this machine and TESSERA_PLACEMENT, which may throw kInvalidArgument.
  CpuPlacement();
  ~CpuPlacement();
  CpuPlacement(const CpuPlacement&) = delete;
  CpuPlacement& operator=(const CpuPlacement&) = delete;

  const CpuTopology& topology() const { return topology_; }
  // The place of each thread of a team, or nobody's; num_threads 0: usable_cores() of them. A plan for an imagined
  // machine is only to be shown.
  PinPlan pins(int num_threads) const;
  const std::vector<int>& interleaved_nodes() const { return interleaved_nodes_; }
  // Active on machines of several nodes, unless the user chose a policy (numactl) or the system refuses.
  // The placement must outlive what it returns.
  [[nodiscard]] InterleavedMemory interleave() const;

 private:
  struct Hwloc;

  PlacementSetting setting_;
  CpuTopology topology_;
  std::vector<int> interleaved_nodes_;
  std::unique_ptr<Hwloc> hwloc_;  // only where there is something to deal out over
};

}  // namespace tessera::device
