// SPDX-License-Identifier: Apache-2.0
#include "engine/waiting_room.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace tessera::engine {

namespace {

// After so many seconds a leaving counts for half.
constexpr double kHalfLifeSeconds = 10;
constexpr double kLeastRetrySeconds = 1, kMostRetrySeconds = 60;

}  // namespace

int64_t WaitingRoom::retry_after(double excess_requests, double excess_tokens) const {
  if (recent_requests_ <= 0) return static_cast<int64_t>(kLeastRetrySeconds);
  const double seconds = recent_seconds_ * std::max(excess_requests / recent_requests_, excess_tokens / recent_tokens_);
  return static_cast<int64_t>(std::ceil(std::clamp(seconds, kLeastRetrySeconds, kMostRetrySeconds)));
}

std::optional<Refusal> WaitingRoom::refusal(int64_t num_tokens) const {
  const double excess_requests = static_cast<double>(num_requests_ + 1 - limits_.max_requests);
  const double excess_tokens = static_cast<double>(num_tokens_) + static_cast<double>(num_tokens - limits_.max_tokens);
  if (excess_requests <= 0 && (excess_tokens <= 0 || num_requests_ == 0)) return std::nullopt;
  const int64_t seconds = retry_after(excess_requests, excess_tokens);
  return Refusal{
      .reason = Refusal::Reason::kFull,
      .message = fmt::format("busy: requests that wait: {} of {}, their prompt tokens: {} of {}; this one has {}; try "
                             "again in {} s",
                             num_requests_, limits_.max_requests, num_tokens_, limits_.max_tokens, num_tokens, seconds),
      .retry_after_seconds = seconds};
}

std::optional<Refusal> WaitingRoom::check(int64_t num_tokens) const {
  const std::lock_guard<std::mutex> hold(lock_);
  return refusal(num_tokens);
}

std::optional<Refusal> WaitingRoom::enter(int64_t num_tokens) {
  const std::lock_guard<std::mutex> hold(lock_);
  if (std::optional<Refusal> refused = refusal(num_tokens)) return refused;
  ++num_requests_;
  num_tokens_ += num_tokens;
  return std::nullopt;
}

void WaitingRoom::leave_begun(int64_t num_tokens, double now) {
  const std::lock_guard<std::mutex> hold(lock_);
  --num_requests_;
  num_tokens_ -= num_tokens;
  const double passed = last_left_ > 0 ? std::max(0.0, now - last_left_) : 0;
  const double kept = std::exp2(-passed / kHalfLifeSeconds);
  recent_requests_ = recent_requests_ * kept + 1;
  recent_tokens_ = recent_tokens_ * kept + static_cast<double>(num_tokens);
  recent_seconds_ = recent_seconds_ * kept + passed;
  last_left_ = now;
}

void WaitingRoom::leave(int64_t num_tokens) {
  const std::lock_guard<std::mutex> hold(lock_);
  --num_requests_;
  num_tokens_ -= num_tokens;
}

int64_t WaitingRoom::num_requests() const {
  const std::lock_guard<std::mutex> hold(lock_);
  return num_requests_;
}

int64_t WaitingRoom::num_tokens() const {
  const std::lock_guard<std::mutex> hold(lock_);
  return num_tokens_;
}

}  // namespace tessera::engine
