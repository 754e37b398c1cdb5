// SPDX-License-Identifier: Apache-2.0
#pragma once
// A few threads for what takes milliseconds: parsing, rendering, tokenising.
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tessera::server {

class Job {
 public:
  virtual ~Job() = default;
  // Must not throw.
  virtual void run() noexcept = 0;
};

class WorkerPool {
 public:
  // At most `max_waiting` jobs wait.
  WorkerPool(int num_threads, size_t max_waiting);
  // Jobs that still wait are dropped; waits for those that run.
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // False: too many wait. Thread-safe.
  bool add(std::unique_ptr<Job> job);

 private:
  void work();

  const size_t max_waiting_;
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<Job>> jobs_;
  bool is_ending_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace tessera::server
