// SPDX-License-Identifier: Apache-2.0
#include "comm/connected_memory.h"

#include <fmt/format.h>

#include <vector>

namespace tessera::comm {

namespace {

// The first of the ranks' reasons; empty: none has one.
std::string first_reason(Bootstrap& bootstrap, const std::string& own) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(own.data());
  for (const std::vector<uint8_t>& why : bootstrap.all_gather({bytes, own.size()})) {
    if (!why.empty()) return {why.begin(), why.end()};
  }
  return "";
}

}  // namespace

std::unique_ptr<PeerMemory> make_connected_memory(Bootstrap& bootstrap, const PeerMemorySize& size,
                                                  std::string& why_not) {
  const int world = bootstrap.world();
  if (world > device::kMaxPeers) {
    why_not = fmt::format("{} ranks, at most {} can", world, device::kMaxPeers);
    return nullptr;
  }
  std::string own;
  std::unique_ptr<PeerMemory> memory = make_peer_memory(bootstrap.rank(), world, size, own);
  const std::vector<uint8_t> address = memory != nullptr ? memory->address() : std::vector<uint8_t>();
  const std::vector<std::vector<uint8_t>> addresses = bootstrap.all_gather(address);
  if (memory != nullptr) own = memory->connect(addresses);
  why_not = first_reason(bootstrap, own);
  if (why_not.empty()) return memory;
  // Nobody frees what another rank has mapped already.
  if (memory != nullptr) memory->disconnect();
  bootstrap.all_gather({});
  return nullptr;
}

}  // namespace tessera::comm
