// SPDX-License-Identifier: Apache-2.0
#include "cache_tiers.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/strings.h"
#include "console.h"
#include "engine/host_tier.h"
#include "program_identity.h"

namespace tessera::app {

namespace {

constexpr double kGiB = 1 << 30;

// A driver may compile kernels anew, and owns what it compiles.
std::string gpu_identity(const device::GpuDevice& gpu) {
  const device::GpuFiles files = device::read_gpu_files("/", {});
  const device::CudaDriverFacts driver = device::ask_cuda_driver("libcuda.so.1");
  return fmt::format("{}|driver {} {} CUDA {}", gpu.name, files.module_version, driver.library_version,
                     driver.cuda_version);
}

}  // namespace

std::vector<const engine::PrefixTier*> CacheTiers::all() const {
  std::vector<const engine::PrefixTier*> out;
  for (const engine::PrefixTier* tier : {host.get(), static_cast<engine::PrefixTier*>(disk.get())}) {
    if (tier != nullptr) out.push_back(tier);
  }
  return out;
}

CacheTiers make_cache_tiers(const CacheTierFlags& flags, const model::ModelFacts& facts, const device::Machine& machine,
                            LogSink& log) {
  CacheTiers tiers;
  const auto host_bytes = static_cast<int64_t>(flags.host_gib * kGiB);
  if (host_bytes > 0 && machine.gpu) tiers.host = std::make_unique<engine::HostTier>(host_bytes);
  if (host_bytes > 0 && !machine.gpu)
    print_warning("--prefix-cache-host-memory does nothing: the prefix cache is there already");
  if (flags.disk_folder.empty()) return tiers;
  engine::DiskTierOptions options;
  options.folder = flags.disk_folder;
  options.budget_bytes = static_cast<int64_t>(flags.disk_gib * kGiB);
  options.identity = fmt::format("{}|{}|{}|{}", facts.state_identity, machine.cpu_name,
                                 machine.gpu ? gpu_identity(*machine.gpu) : "", program_identity());
  options.log = &log;
  tiers.disk = std::make_unique<engine::DiskTier>(options);
  return tiers;
}

void print_cache_tiers(const CacheTiers& tiers) {
  for (const engine::PrefixTier* tier : tiers.all()) {
    if (tier == tiers.disk.get() && !tiers.disk->is_on()) continue;  // the log has why
    const engine::TierStats stats = tier->stats();
    print_note(fmt::format("prefix cache on the {}: {} of {}, {} snapshots", stats.name,
                           format_bytes(static_cast<uint64_t>(stats.bytes)),
                           format_bytes(static_cast<uint64_t>(stats.total_bytes)), stats.num_snapshots));
  }
}

}  // namespace tessera::app
