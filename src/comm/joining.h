// SPDX-License-Identifier: Apache-2.0
#pragma once
// The first part of a bootstrap: from a place to connections whose other sides are known and genuine.
#include <memory>
#include <vector>

#include "comm/bootstrap.h"
#include "comm/connection.h"

namespace tessera::comm {

// By rank; null for oneself. Rank 0 has one to every other rank, the others have one to rank 0. All ranks are there.
// Throws as Bootstrap's constructor.
using Links = std::vector<std::unique_ptr<Connection>>;
Links join_ranks(const BootstrapOptions& options, LogSink* log, Socket listener);
// In place of it: the others learn that this rank does not come. Throws where they can't.
void tell_of_failure(const BootstrapOptions& options, const std::string& message);

// The payload of kLost, and of it.
std::vector<uint8_t> lost_payload(int rank, std::string_view message);
std::string lost_message(std::span<const uint8_t> payload, int& rank);

}  // namespace tessera::comm
