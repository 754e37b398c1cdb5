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

  enum class Added { kYes, kTooManyGrammars, kTooManyRequests };
  // `key`: of the grammar that `job` compiles. Thread-safe.
  Added add(const std::string& key, std::unique_ptr<Job> job);

  // The machine could not compile it now, which takes many seconds to find out: has_failed(key) until all that wait for
  // it have left. Thread-safe.
  void fail(const std::string& key);
  bool has_failed(const std::string& key);

 private:
  class Entry;
  struct Waiting {
    size_t num_requests = 0;
    bool has_failed = false;
  };
  void leave(const std::string& key);

  const size_t max_grammars_;
  std::mutex lock_;
  std::unordered_map<std::string, Waiting> waiting_;  // by key
  WorkerPool thread_;                                 // last: its jobs use all else
};

}  // namespace tessera::server
