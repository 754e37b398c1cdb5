// SPDX-License-Identifier: Apache-2.0
#pragma once
// Requests sent to a server as a load, by one thread that waits for none of them. Open: at random moments of a given
// rate (a Poisson process), whether earlier ones are answered or not, each measured from the moment when it was due.
// Closed: so many at a time, each next one when one has ended.
#include <cstdint>
#include <string>
#include <vector>

#include "bench/serve/address.h"
#include "bench/serve/workload.h"

namespace tessera::bench {

struct LoadPoint {
  double requests_per_second = 0;  // open; 0: closed
  int64_t concurrency = 0;         // of a closed one
  bool is_open() const { return requests_per_second > 0; }
};

// A point sends until one of the first two is reached; what is under way then may end.
struct LoadLimits {
  int64_t num_requests = 100;
  int64_t first_request = 0;  // the workload's number of the first; others follow
  double seconds = 30;
  double answer_seconds = 300;     // of one request, then it counts as failed
  int64_t max_connections = 4000;  // an open point sends no more at once; who is due then counts as failed
};

// Times in seconds on the steady clock.
struct RequestRecord {
  double due = 0;  // when it was to be sent
  double end = 0;
  std::vector<double> texts;  // when text came: an event may hold several tokens, and an unfinished character none
  std::vector<int64_t> text_bytes;                                  // with each of those, of all text so far
  int status = 0;                                                   // of HTTP; 0: no answer
  std::string error;                                                // empty: a whole stream came
  int64_t prompt_tokens = 0, cached_tokens = 0, output_tokens = 0;  // as the server counted
};

struct LoadResult {
  LoadPoint point;
  std::vector<RequestRecord> records;  // in the order of sending
  double seconds = 0;                  // from the first request due to the last end
  bool was_stopped = false;
};

class LoadObserver {
 public:
  virtual ~LoadObserver() = default;
  virtual void ended(const RequestRecord& record) = 0;
  // Looked at ten times a second; true gives up what is under way.
  virtual bool stops() = 0;
};

// `key`: an API key, or empty. Throws kResourceExhausted where this process can't make sockets; what goes wrong with a
// request is in its record.
LoadResult run_load(const Address& address, const Workload& workload, const std::string& key, const LoadPoint& point,
                    const LoadLimits& limits, uint64_t seed, LoadObserver& observer);

}  // namespace tessera::bench
