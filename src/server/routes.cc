// SPDX-License-Identifier: Apache-2.0
#include "server/routes.h"

namespace tessera::server {

namespace {

constexpr Route kRoutes[] = {
    {RouteKind::kChat, "/v1/chat/completions", true, true},
    {RouteKind::kCompletions, "/v1/completions", true, true},
    {RouteKind::kResponses, "/v1/responses", true, true},
    {RouteKind::kMessages, "/v1/messages", true, true, ErrorStyle::kAnthropic},
    {RouteKind::kCountTokens, "/v1/messages/count_tokens", true, true, ErrorStyle::kAnthropic},
    {RouteKind::kTokenize, "/tokenize", true, true},
    {RouteKind::kDetokenize, "/detokenize", true, true},
    {RouteKind::kModels, "/v1/models", false, true},
    {RouteKind::kModel, "/v1/models/*", false, true},
    {RouteKind::kHealth, "/health", false, false},
    {RouteKind::kLive, "/health/live", false, false},
    {RouteKind::kReady, "/health/ready", false, false},
    {RouteKind::kDeep, "/health/deep", false, true},
    {RouteKind::kMetrics, "/metrics", false, true},
    {RouteKind::kOpenapi, "/openapi.json", false, true},
    {RouteKind::kPage, "/", false, true},
};

}  // namespace

std::span<const Route> routes() {
  return kRoutes;
}

const Route* find_route(std::string_view path, std::string_view& name) {
  name = {};
  for (const Route& route : kRoutes) {
    if (!route.path.ends_with("/*")) {
      if (path == route.path) return &route;
      continue;
    }
    const std::string_view before = route.path.substr(0, route.path.size() - 1);
    if (!path.starts_with(before) || path.size() == before.size()) continue;
    name = path.substr(before.size());
    return &route;
  }
  return nullptr;
}

ErrorStyle error_style(std::string_view path) {
  return path == "/v1/messages" || path.starts_with("/v1/messages/") ? ErrorStyle::kAnthropic : ErrorStyle::kOpenai;
}

}  // namespace tessera::server
