// SPDX-License-Identifier: Apache-2.0
#pragma once
// The tiers below the prefix cache that `tessera serve` was asked for (decision 0028).
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/log.h"
#include "device/machine.h"
#include "engine/disk_tier.h"
#include "engine/prefix_cache.h"

namespace tessera::app {

struct CacheTierFlags {
  double host_gib = 0;
  std::string disk_folder;  // empty: none
  double disk_gib = 64;
};

struct CacheTiers {
  std::unique_ptr<engine::PrefixTier> host;  // null: none
  std::unique_ptr<engine::DiskTier> disk;    // null: none
  std::vector<const engine::PrefixTier*> all() const;
};

// For states of `facts`' model on this machine. What a state's bits follow from besides is this program's own file. A
// disk that can't be used is said on `log`, which must outlive the tiers, and counted.
CacheTiers make_cache_tiers(const CacheTierFlags& flags, const model::ModelFacts& facts, const device::Machine& machine,
                            LogSink& log);
// A line for stderr about each.
void print_cache_tiers(const CacheTiers& tiers);

}  // namespace tessera::app
