// SPDX-License-Identifier: Apache-2.0
#include "comm/expert_exchange.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "comm/connected_memory.h"

namespace tessera::comm {

namespace {

std::string words(const device::ExpertPeersShape& shape) {
  return fmt::format("{} tokens of {} experts each, rows of {}", shape.max_tokens, shape.top_k, shape.hidden);
}

// The first rank that asks for something else than rank 0; empty: none does.
std::string difference(Bootstrap& bootstrap, const device::ExpertPeersShape& shape) {
  std::vector<uint8_t> own(sizeof(shape));
  std::memcpy(own.data(), &shape, own.size());
  const std::vector<std::vector<uint8_t>> all = bootstrap.all_gather(own);
  const auto shape_of = [&](size_t rank) {
    device::ExpertPeersShape of;
    std::memcpy(&of, all[rank].data(), std::min(all[rank].size(), sizeof(of)));
    return of;
  };
  for (size_t r = 1; r < all.size(); ++r) {
    if (all[r] == all[0]) continue;
    return fmt::format("rank 0 exchanges {}, rank {} {}", words(shape_of(0)), r, words(shape_of(r)));
  }
  return "";
}

}  // namespace

ExpertExchange::ExpertExchange(std::unique_ptr<PeerMemory> memory, const device::ExpertPeersShape& shape)
    : memory_(std::move(memory)), peers_{memory_->view(), shape} {}

ExpertExchange::~ExpertExchange() {
  memory_->end();
}

std::unique_ptr<ExpertExchange> make_expert_exchange(Bootstrap& bootstrap, const device::ExpertPeersShape& shape,
                                                     std::string& why_not) {
  if (shape.max_tokens < 1 || shape.top_k < 1 || shape.hidden < 1 ||
      shape.hidden % device::ExpertPeersShape::kValues != 0) {
    fail(ErrorCode::kInvalidArgument, "experts of ranks can't exchange " + words(shape));
  }
  why_not = difference(bootstrap, shape);
  if (!why_not.empty()) return nullptr;
  std::unique_ptr<PeerMemory> memory =
      make_connected_memory(bootstrap, {.capacity = shape.sent_slots(), .more_slots = shape.returned_slots()}, why_not);
  return memory == nullptr ? nullptr : std::make_unique<ExpertExchange>(std::move(memory), shape);
}

}  // namespace tessera::comm
