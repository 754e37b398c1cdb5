// SPDX-License-Identifier: Apache-2.0
#include "server/figures.h"

namespace tessera::server {

void Figures::add_answered(std::string_view route, int status) {
  const std::lock_guard<std::mutex> hold(lock_);
  ++answered_[{std::string(route), status}];
}

void Figures::add_finished(std::string_view reason) {
  const std::lock_guard<std::mutex> hold(lock_);
  const auto found = finished_.find(reason);
  ++(found != finished_.end() ? found->second : finished_[std::string(reason)]);
}

void Figures::add_outcome(const engine::Outcome& outcome) {
  const std::lock_guard<std::mutex> hold(lock_);
  if (outcome.first_token_seconds > 0) stats_.first_token.add(outcome.first_token_seconds);
  stats_.whole_request.add(outcome.seconds);
  stats_.in_queue.add(outcome.waited_seconds);
}

void Figures::add_gaps(std::span<const double> seconds) {
  const std::lock_guard<std::mutex> hold(lock_);
  for (const double gap : seconds) stats_.between_tokens.add(gap);
}

double Figures::uptime_seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count();
}

void Figures::add_connections(int64_t difference) {
  const std::lock_guard<std::mutex> hold(lock_);
  stats_.num_connections += static_cast<uint64_t>(difference);
}

void Figures::add_streams(int64_t difference) {
  const std::lock_guard<std::mutex> hold(lock_);
  stats_.num_streams += static_cast<uint64_t>(difference);
}

ServerStats Figures::snapshot(const engine::Engine::Status& status) const {
  const std::lock_guard<std::mutex> hold(lock_);
  ServerStats out = stats_;
  const auto count = [](int64_t value) { return static_cast<uint64_t>(value); };
  const engine::StepStats& step = status.last_step;
  out.num_running = count(step.num_running);
  out.num_waiting = count(step.num_waiting);
  out.num_waiting_prompt_tokens = count(status.num_waiting_tokens);
  out.cache_bytes = count(step.cache_bytes);
  if (step.cache_total_bytes > 0) {
    out.cache_usage = static_cast<double>(step.cache_bytes) / static_cast<double>(step.cache_total_bytes);
  }
  out.num_prompt_tokens = count(status.totals.num_prompt_tokens);
  out.num_generated_tokens = count(status.totals.num_drawn);
  out.num_steps = count(status.totals.num_steps);
  out.step_seconds = status.totals.step_seconds, out.model_seconds = status.totals.model_seconds;
  out.num_preemptions = count(status.totals.num_swapped + status.totals.num_recomputed);
  out.num_snapshots = count(step.num_snapshots);
  out.snapshot_bytes = count(step.snapshot_bytes);
  if (step.snapshot_total_bytes > 0) {
    out.snapshot_usage = static_cast<double>(step.snapshot_bytes) / static_cast<double>(step.snapshot_total_bytes);
  }
  out.num_prefix_queries = count(status.totals.num_lookup_tokens);
  out.num_prefix_lookups = count(status.totals.num_lookups);
  out.num_prefix_found = count(status.totals.num_hits);
  out.num_snapshots_kept = count(status.totals.num_snapshots_kept);
  out.num_snapshots_evicted = count(status.totals.num_snapshots_evicted);
  out.num_prefix_hits = count(status.totals.num_cached_tokens);
  for (const auto& [reason, number] : finished_) out.finished.push_back({reason, number});
  for (const auto& [key, number] : answered_) out.answered.push_back({key.first, key.second, number});
  return out;
}

}  // namespace tessera::server
