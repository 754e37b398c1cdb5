// SPDX-License-Identifier: Apache-2.0
#include "server/loading.h"

#include <utility>

#include "server/status_pages.h"

namespace tessera::server {

ReplyPart loading_reply(const Route& route, double uptime_seconds) {
  ReplyHead head;
  std::string body;
  if (route.kind == RouteKind::kLive) {
    body = render_liveness(uptime_seconds);
  } else {
    head.status = 503;
    head.retry_after_seconds = kLoadingRetrySeconds;
    const bool is_health =
        route.kind == RouteKind::kHealth || route.kind == RouteKind::kReady || route.kind == RouteKind::kDeep;
    const Health health{.readiness = Readiness::kLoading, .detail = "", .uptime_seconds = uptime_seconds};
    body = is_health ? render_health(health) : error_body(route.errors, model_loading());
  }
  return {.head = std::move(head), .text = std::move(body), .is_last = true};
}

}  // namespace tessera::server
