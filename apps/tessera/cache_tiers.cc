// SPDX-License-Identifier: Apache-2.0
#include "cache_tiers.h"

#include <fmt/format.h>
#include <gnu/libc-version.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>

#include "base/file.h"
#include "base/strings.h"
#include "console.h"
#include "engine/disk_tier.h"
#include "engine/host_tier.h"

namespace tessera::app {

namespace {

constexpr double kGiB = 1 << 30;

// Kernels of another build may have other bits, whatever its version says; so may the C library's exp and log.
std::string program_identity() {
  const File file = File::open_read("/proc/self/exe");
  const uint64_t size = file.size();
  std::vector<char> piece(size_t{1} << 20);
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  for (uint64_t at = 0; at < size; at += piece.size()) {
    const size_t bytes = static_cast<size_t>(std::min<uint64_t>(piece.size(), size - at));
    file.read_at(at, piece.data(), bytes);
    XXH3_128bits_update(&state, piece.data(), bytes);
  }
  const XXH128_hash_t hash = XXH3_128bits_digest(&state);
  return fmt::format("{:016x}{:016x}|glibc {}", hash.high64, hash.low64, gnu_get_libc_version());
}

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
  for (const engine::PrefixTier* tier : {host.get(), disk.get()}) {
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
    print_note("--prefix-cache-host-memory does nothing: the prefix cache is there already");
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
    const engine::TierStats stats = tier->stats();
    print_note(fmt::format("prefix cache on the {}: {} of {}, {} snapshots", stats.name,
                           format_bytes(static_cast<uint64_t>(stats.bytes)),
                           format_bytes(static_cast<uint64_t>(stats.total_bytes)), stats.num_snapshots));
  }
}

}  // namespace tessera::app
