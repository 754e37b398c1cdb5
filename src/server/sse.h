// SPDX-License-Identifier: Apache-2.0
#pragma once
// Lines of a text/event-stream. `json` is one line: JSON text has no raw line ends.
// Source: HTML standard, section 9.2 (server-sent events).
#include <string>
#include <string_view>

namespace tessera::server {

// A comment, which clients skip: keeps connections open during long prefills.
inline constexpr std::string_view kSseKeepAlive = ": ping\n\n";
// What OpenAI's streams of chunks end with.
inline constexpr std::string_view kSseDone = "data: [DONE]\n\n";

inline std::string sse_data(std::string_view json) {
  return std::string("data: ").append(json).append("\n\n");
}

inline std::string sse_event(std::string_view name, std::string_view json) {
  return std::string("event: ").append(name).append("\ndata: ").append(json).append("\n\n");
}

}  // namespace tessera::server
