// SPDX-License-Identifier: Apache-2.0
#pragma once
// What routes answer before there is a service: a model takes minutes to load.
#include <cstdint>

#include "server/exchange.h"
#include "server/routes.h"

namespace tessera::server {

// When to ask again, for clients: loading takes seconds at least.
inline constexpr int64_t kLoadingRetrySeconds = 5;

// The whole answer to a request: the process lives, and is not ready.
ReplyPart loading_reply(const Route& route, double uptime_seconds);

}  // namespace tessera::server
