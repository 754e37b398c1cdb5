// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which paths there are, and what each wants.
#include <cstdint>
#include <span>
#include <string_view>

#include "server/answer_writer.h"

namespace tessera::server {

enum class RouteKind : uint8_t {
  kChat,
  kCompletions,
  kResponses,
  kMessages,
  kCountTokens,
  kTokenize,
  kDetokenize,
  kModels,
  kModel,
  kHealth,
  kLive,
  kReady,
  kDeep,
  kMetrics,
  kOpenapi,
  kPage,
};

struct Route {
  RouteKind kind;
  std::string_view path;  // a last /* stands for a name; also what metrics call it
  bool is_post;           // else GET
  bool needs_key;
  ErrorStyle errors = ErrorStyle::kOpenai;
};

// All of them.
std::span<const Route> routes();
// The route of a path without its query; nullptr: none. `name` is what stands for the star.
const Route* find_route(std::string_view path, std::string_view& name);
// How errors look for a path that may have no route.
ErrorStyle error_style(std::string_view path);

}  // namespace tessera::server
