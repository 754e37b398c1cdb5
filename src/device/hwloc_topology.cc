// SPDX-License-Identifier: Apache-2.0
#include "device/hwloc_topology.h"

#include <fmt/format.h>

#include <filesystem>
#include <system_error>
#include <utility>

#include "base/env.h"
#include "base/error.h"
#include "base/strings.h"

namespace tessera::device {

namespace {

// Whether /sys tells of cores, as it does not in a bare chroot: hwloc would say so on stderr.
bool has_cpu_files() {
  std::error_code ignored;
  for (const char* folder : {"/sys/bus/cpu/devices/cpu0/topology/", "/sys/devices/system/cpu/cpu0/topology/"}) {
    for (const char* name : {"package_cpus", "core_cpus", "core_siblings", "thread_siblings"}) {
      if (std::filesystem::exists(std::string(folder) + name, ignored)) return true;
    }
  }
  return false;
}

}  // namespace

HwlocTopology load_hwloc_topology(const std::string& synthetic) {
  if (synthetic.empty() && !env_value("HWLOC_SYNTHETIC") && !has_cpu_files()) return nullptr;
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return nullptr;
  HwlocTopology topology(raw);
  // No caches, and no instruction that needs a tour of all processors: a quarter of the time. Packages and groups stay:
  // memory nodes hang on them.
  hwloc_topology_set_cache_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_NONE);
  hwloc_topology_set_icache_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_NONE);
  hwloc_topology_set_components(raw, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, "x86");
  if (!synthetic.empty() && hwloc_topology_set_synthetic(raw, synthetic.c_str()) != 0) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format("machine \"{}\": expected a synthetic topology as hwloc(7) has it", printable(synthetic, 100)));
  }
  return hwloc_topology_load(raw) == 0 ? std::move(topology) : nullptr;
}

}  // namespace tessera::device
