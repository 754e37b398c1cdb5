// SPDX-License-Identifier: Apache-2.0
#pragma once
// Requests that wait for a new grammar of theirs. Grammars are compiled one at a time; requests for the same one wait
// for one compilation, so a hundred clients that begin with the same tools are not too many.
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "server/worker_pool.h"

namespace tessera::server {

class CompilingLane {
 public:
  // At most `max_grammars` different ones at a time, the one that is compiled included, of `max_requests` that wait.
  CompilingLane(size_t max_grammars, size_t max_requests);

  // `key`: of the grammar that `job` compiles. False: too many. Thread-safe.
  bool add(const std::string& key, std::unique_ptr<Job> job);

 private:
  class Entry;
  void leave(const std::string& key);

  const size_t max_grammars_;
  std::mutex lock_;
  std::unordered_map<std::string, size_t> num_requests_;  // by key
  WorkerPool thread_;                                     // last: its jobs use all else
};

}  // namespace tessera::server
