// SPDX-License-Identifier: Apache-2.0
#include "device/cpu_placement.h"

#include <utility>

#include "device/hwloc_topology.h"
#include "device/machine.h"

namespace tessera::device {

namespace {

constexpr int kBindFlags = HWLOC_MEMBIND_THREAD | HWLOC_MEMBIND_BYNODESET;

struct BitmapFree {
  void operator()(hwloc_bitmap_t bitmap) const { hwloc_bitmap_free(bitmap); }
};
using Bitmap = std::unique_ptr<hwloc_bitmap_s, BitmapFree>;

}  // namespace

struct CpuPlacement::Hwloc {
  HwlocTopology topology;
  Bitmap nodes;
};

InterleavedMemory::InterleavedMemory() = default;

InterleavedMemory::InterleavedMemory(InterleavedMemory&& other) noexcept
    : topology_(std::exchange(other.topology_, nullptr)) {}

InterleavedMemory::~InterleavedMemory() {
  if (topology_ == nullptr) return;
  hwloc_set_membind(topology_, hwloc_topology_get_topology_nodeset(topology_), HWLOC_MEMBIND_DEFAULT, kBindFlags);
}

CpuPlacement::CpuPlacement() : setting_(placement_setting()), topology_(probe_cpu_topology()) {
  interleaved_nodes_ = nodes_to_interleave(topology_, setting_);
  if (interleaved_nodes_.empty()) return;
  auto hwloc = std::make_unique<Hwloc>(Hwloc{load_hwloc_topology(), Bitmap(hwloc_bitmap_alloc())});
  if (hwloc->topology == nullptr || hwloc->nodes == nullptr) return;
  for (const int node : interleaved_nodes_) hwloc_bitmap_set(hwloc->nodes.get(), static_cast<unsigned>(node));
  hwloc_ = std::move(hwloc);
}

CpuPlacement::~CpuPlacement() = default;

PinPlan CpuPlacement::pins(int num_threads) const {
  const int usable = topology_.is_imagined ? static_cast<int>(topology_.processors.size()) : usable_cores();
  return plan_pins(topology_, num_threads > 0 ? num_threads : usable, usable, setting_);
}

InterleavedMemory CpuPlacement::interleave() const {
  if (hwloc_ == nullptr || topology_.is_imagined) return {};
  const hwloc_topology_t topology = hwloc_->topology.get();
  const Bitmap present(hwloc_bitmap_alloc());
  hwloc_membind_policy_t policy = HWLOC_MEMBIND_MIXED;
  if (present == nullptr || hwloc_get_membind(topology, present.get(), &policy, kBindFlags) != 0) return {};
  if (policy != HWLOC_MEMBIND_DEFAULT && policy != HWLOC_MEMBIND_FIRSTTOUCH) return {};
  if (hwloc_set_membind(topology, hwloc_->nodes.get(), HWLOC_MEMBIND_INTERLEAVE, kBindFlags) != 0) return {};
  return InterleavedMemory(topology);
}

}  // namespace tessera::device
