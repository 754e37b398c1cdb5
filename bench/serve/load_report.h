// SPDX-License-Identifier: Apache-2.0
#pragma once
// What is said of a load: per point, how long clients waited and how much came.
#include <map>
#include <string>
#include <vector>

#include "bench/ops/timing.h"
#include "bench/serve/load.h"

namespace tessera::bench {

struct LoadSummary {
  LoadPoint point;
  double seconds = 0;
  bool was_stopped = false;
  int64_t num_requests = 0, num_answered = 0;
  int64_t num_refused = 0;                // 429
  std::map<std::string, int64_t> errors;  // all others that were not answered, by what was said
  int64_t prompt_tokens = 0, cached_tokens = 0, output_tokens = 0;  // of those answered
  // Of those answered: until the first text, between events with text, the whole answer, and per token after the first
  // event (where the server counted more than one token).
  Samples first_token, between_texts, whole, per_token;
  Samples refusal;  // until a 429 was there

  double requests_per_second() const { return seconds > 0 ? static_cast<double>(num_answered) / seconds : 0; }
  double tokens_per_second() const { return seconds > 0 ? static_cast<double>(output_tokens) / seconds : 0; }
};

LoadSummary summary_of(const LoadResult& result);

// "5 requests/s", "8 at a time".
std::string to_string(const LoadPoint& point);
// The table's head and a point's line; times in milliseconds.
std::string load_table_head();
std::string load_table_row(const LoadSummary& summary);
// What went wrong, a line each; empty where nothing did.
std::vector<std::string> load_notes(const LoadSummary& summary);

// A picture with a group of bars for each point. `what` says who was asked what, `machine` where.
std::string load_svg(const std::vector<LoadSummary>& points, const std::string& what, const std::string& machine);

}  // namespace tessera::bench
