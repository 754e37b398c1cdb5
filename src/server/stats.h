// SPDX-License-Identifier: Apache-2.0
#pragma once
// Figures of a running server, as plain data: the engine's loop and the transport fill them in, renderers read them.
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::server {

// How often a duration fell into each interval. Bounds are in seconds, rising; the last count is of what is above all.
template <size_t kNumBounds>
struct Histogram {
  std::array<double, kNumBounds> bounds{};
  std::array<uint64_t, kNumBounds + 1> counts{};
  double sum = 0;  // seconds

  void add(double seconds) {
    size_t place = 0;
    while (place < kNumBounds && seconds > bounds[place]) ++place;
    ++counts[place];
    sum += seconds;
  }
};

inline constexpr std::array<double, 14> kLongSeconds = {0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16,
                                                        0.32,  0.64,  1.28, 2.56, 10,   40,   160};
inline constexpr std::array<double, 14> kShortSeconds = {0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03,
                                                         0.04,  0.05,   0.075, 0.1,  0.2,   0.5,  1};

struct ServerStats {
  std::string model;
  // Now.
  uint64_t num_running = 0, num_waiting = 0, num_waiting_prompt_tokens = 0, num_connections = 0, num_streams = 0;
  double cache_usage = 0;  // share of cache pages in use, 0 to 1
  uint64_t cache_bytes = 0, resident_bytes = 0;
  uint64_t num_snapshots = 0, snapshot_bytes = 0;  // of the prefix cache
  double snapshot_usage = 0;                       // share of its budget, 0 to 1
  // Since the start.
  uint64_t num_prompt_tokens = 0, num_generated_tokens = 0, num_steps = 0, num_preemptions = 0;
  double step_seconds = 0, model_seconds = 0;             // of those steps; in the model's part of them
  uint64_t num_prefix_queries = 0, num_prefix_hits = 0;   // tokens that were looked up in the prefix cache, and found
  uint64_t num_prefix_lookups = 0, num_prefix_found = 0;  // requests, and those of which a beginning was found
  uint64_t num_snapshots_kept = 0, num_snapshots_evicted = 0;
  struct Tier {
    std::string name;                                        // host, disk
    uint64_t num_snapshots = 0, bytes = 0, total_bytes = 0;  // now
    uint64_t num_hits = 0, num_hit_tokens = 0, num_stored = 0, num_evicted = 0, num_dropped = 0, num_faults = 0;
  };
  std::vector<Tier> tiers;  // below the prefix cache
  uint64_t num_replay_hits = 0, num_replay_misses = 0;
  struct Finished {
    std::string reason;  // stop, length, tool_calls, cancelled, error
    uint64_t count = 0;
  };
  std::vector<Finished> finished;
  struct Answered {
    std::string route;
    int status = 0;
    uint64_t count = 0;
  };
  std::vector<Answered> answered;
  Histogram<14> first_token{kLongSeconds, {}, 0};      // from the request's arrival
  Histogram<14> between_tokens{kShortSeconds, {}, 0};  // of one choice
  Histogram<14> whole_request{kLongSeconds, {}, 0};    // from arrival to the last token
  Histogram<14> in_queue{kLongSeconds, {}, 0};         // from arrival to the first step
};

enum class Readiness { kLoading, kReady, kDraining, kFailed };
std::string_view to_string(Readiness readiness);

struct Health {
  Readiness readiness = Readiness::kLoading;
  std::string detail;  // one line; empty: none
  double uptime_seconds = 0;
  double deep_seconds = -1;  // how long the deep check's token took; below 0: none was made
};

}  // namespace tessera::server
