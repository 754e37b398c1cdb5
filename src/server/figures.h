// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the server counts while it runs, for /metrics, from before there is a service on. Thread-safe.
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "engine/engine.h"
#include "server/stats.h"

namespace tessera::server {

class Figures {
 public:
  // An answer's head was decided; `route` is one of the program's own words.
  void add_answered(std::string_view route, int status);
  // A choice ended: stop, length, tool_calls, cancelled or error. These need no memory.
  void add_finished(std::string_view reason);
  // A request of the engine ended.
  void add_outcome(const engine::Outcome& outcome);
  // Seconds between tokens of one choice.
  void add_gaps(std::span<const double> seconds);
  void add_connections(int64_t difference);
  void add_streams(int64_t difference);
  // Since it was made.
  double uptime_seconds() const;

  // With what the engine says of itself; replay, cache and resident figures are the caller's to fill in.
  ServerStats snapshot(const engine::Engine::Status& status) const;

 private:
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  mutable std::mutex lock_;
  ServerStats stats_;
  std::map<std::string, uint64_t, std::less<>> finished_{
      {"stop", 0}, {"length", 0}, {"tool_calls", 0}, {"cancelled", 0}, {"error", 0}};
  std::map<std::pair<std::string, int>, uint64_t> answered_;
};

}  // namespace tessera::server
