// SPDX-License-Identifier: Apache-2.0
#include "server/compiling_lane.h"

#include <utility>

namespace tessera::server {

class CompilingLane::Entry final : public Job {
 public:
  Entry(CompilingLane& lane, std::string key, std::unique_ptr<Job> job)
      : lane_(lane), key_(std::move(key)), job_(std::move(job)) {}
  // Also where it is dropped without having run.
  ~Entry() override { lane_.leave(key_); }
  void run() noexcept override { job_->run(); }

 private:
  CompilingLane& lane_;
  const std::string key_;
  const std::unique_ptr<Job> job_;
};

CompilingLane::CompilingLane(size_t max_grammars, size_t max_requests)
    : max_grammars_(max_grammars), thread_(1, max_requests) {}

bool CompilingLane::add(const std::string& key, std::unique_ptr<Job> job) {
  {
    const std::lock_guard<std::mutex> hold(lock_);
    if (!num_requests_.contains(key) && num_requests_.size() >= max_grammars_) return false;
    ++num_requests_[key];
  }
  return thread_.add(std::make_unique<Entry>(*this, key, std::move(job)));
}

void CompilingLane::leave(const std::string& key) {
  const std::lock_guard<std::mutex> hold(lock_);
  const auto found = num_requests_.find(key);
  if (--found->second == 0) num_requests_.erase(found);
}

}  // namespace tessera::server
