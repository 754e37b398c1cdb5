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

CompilingLane::Added CompilingLane::add(const std::string& key, std::unique_ptr<Job> job) {
  std::unique_ptr<Entry> entry;
  {
    const std::lock_guard<std::mutex> hold(lock_);
    if (!waiting_.contains(key) && waiting_.size() >= max_grammars_) return Added::kTooManyGrammars;
    entry = std::make_unique<Entry>(*this, key, std::move(job));
    ++waiting_[key].num_requests;
  }
  return thread_.add(std::move(entry)) ? Added::kYes : Added::kTooManyRequests;
}

void CompilingLane::fail(const std::string& key) {
  const std::lock_guard<std::mutex> hold(lock_);
  const auto found = waiting_.find(key);
  if (found != waiting_.end()) found->second.has_failed = true;
}

bool CompilingLane::has_failed(const std::string& key) {
  const std::lock_guard<std::mutex> hold(lock_);
  const auto found = waiting_.find(key);
  return found != waiting_.end() && found->second.has_failed;
}

void CompilingLane::leave(const std::string& key) {
  const std::lock_guard<std::mutex> hold(lock_);
  const auto found = waiting_.find(key);
  if (found != waiting_.end() && --found->second.num_requests == 0) waiting_.erase(found);
}

}  // namespace tessera::server
