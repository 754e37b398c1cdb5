// SPDX-License-Identifier: Apache-2.0
#include "server/status_pages.h"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>

#include "server/json_text.h"

namespace tessera::server {

namespace {

// 2026-11-21T20:00:00Z.
std::string utc_time(int64_t seconds) {
  const std::time_t time = seconds;
  std::tm parts{};
  gmtime_r(&time, &parts);
  char text[32];
  const size_t size = std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return {text, size};
}

JsonObject model_json(const ServedModel& model, const std::string& name, int64_t created) {
  return {{"id", name},
          {"object", "model"},
          {"created", created},
          {"owned_by", "tessera"},
          {"root", model.names.front()},
          {"max_model_len", model.max_model_len},
          {"type", "model"},
          {"display_name", name},
          {"created_at", utc_time(created)}};
}

// In quotes, as label values are written.
std::string label(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '\\' || c == '"') out += '\\';
    out += c == '\n' ? ' ' : c;
  }
  return out + '"';
}

// Metrics as text. Every family begins with its help and type.
class MetricsText {
 public:
  explicit MetricsText(const std::string& model) : model_(fmt::format("model_name={}", label(model))) {}

  void family(std::string_view name, std::string_view type, std::string_view help) {
    out_ += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
  }
  void sample(std::string_view name, double value, std::string_view labels = "") {
    out_ += fmt::format("{}{{{}{}{}}} {}\n", name, model_, labels.empty() ? "" : ",", labels, value);
  }
  // One value under our name and, where there is one, under vLLM's.
  void value(std::string_view ours, std::string_view vllm, std::string_view type, std::string_view help, double value) {
    for (const std::string_view name : {ours, vllm}) {
      if (name.empty()) continue;
      family(name, type, help);
      sample(name, value);
    }
  }
  template <size_t kNumBounds>
  void histogram(std::string_view ours, std::string_view vllm, std::string_view help,
                 const Histogram<kNumBounds>& times) {
    for (const std::string_view name : {ours, vllm}) {
      if (name.empty()) continue;
      family(name, "histogram", help);
      const std::string bucket = fmt::format("{}_bucket", name);
      uint64_t total = 0;
      for (size_t i = 0; i < kNumBounds; ++i) {
        total += times.counts[i];
        sample(bucket, static_cast<double>(total), fmt::format("le=\"{}\"", times.bounds[i]));
      }
      total += times.counts[kNumBounds];
      sample(bucket, static_cast<double>(total), "le=\"+Inf\"");
      sample(fmt::format("{}_sum", name), times.sum);
      sample(fmt::format("{}_count", name), static_cast<double>(total));
    }
  }
  std::string take() { return std::move(out_); }

 private:
  std::string model_, out_;
};

// A family for each figure, a sample for each tier.
void render_tiers(const std::vector<ServerStats::Tier>& tiers, MetricsText& text) {
  struct Figure {
    const char *name, *type, *help;
    uint64_t ServerStats::Tier::*value;
  };
  using Tier = ServerStats::Tier;
  static constexpr Figure kFigures[] = {
      {"tessera_cache_tier_snapshots", "gauge", "Snapshots in a tier below the prefix cache.", &Tier::num_snapshots},
      {"tessera_cache_tier_bytes", "gauge", "Bytes that a tier's snapshots take.", &Tier::bytes},
      {"tessera_cache_tier_limit_bytes", "gauge", "Bytes that they may take.", &Tier::total_bytes},
      {"tessera_cache_tier_hits_total", "counter", "Snapshots brought back from a tier.", &Tier::num_hits},
      {"tessera_cache_tier_hit_tokens_total", "counter", "Tokens that those had seen.", &Tier::num_hit_tokens},
      {"tessera_cache_tier_insertions_total", "counter", "Snapshots that a tier took.", &Tier::num_stored},
      {"tessera_cache_tier_evictions_total", "counter", "Entries that went for others.", &Tier::num_evicted},
      {"tessera_cache_tier_refusals_total", "counter", "Snapshots that it was too busy to take.", &Tier::num_dropped},
      {"tessera_cache_tier_faults_total", "counter", "Entries that failed to be written, read or verified.",
       &Tier::num_faults},
  };
  if (tiers.empty()) return;
  for (const Figure& figure : kFigures) {
    text.family(figure.name, figure.type, figure.help);
    for (const Tier& tier : tiers) {
      text.sample(figure.name, static_cast<double>(tier.*figure.value), fmt::format("tier={}", label(tier.name)));
    }
  }
}

}  // namespace

std::string_view to_string(Readiness readiness) {
  switch (readiness) {
    case Readiness::kLoading:
      return "loading";
    case Readiness::kReady:
      return "ready";
    case Readiness::kDraining:
      return "draining";
    case Readiness::kFailed:
      return "failed";
  }
  return "";
}

std::string render_liveness(double uptime_seconds) {
  return JsonObject{{"status", "live"}, {"uptime_seconds", uptime_seconds}}.text();
}

int health_status(const Health& health) {
  return health.readiness == Readiness::kReady ? 200 : 503;
}

std::string render_health(const Health& health) {
  JsonObject out{{"status", to_string(health.readiness)}, {"uptime_seconds", health.uptime_seconds}};
  if (!health.detail.empty()) out.add("detail", health.detail);
  if (health.deep_seconds >= 0) out.add("check_seconds", health.deep_seconds);
  return out.text();
}

std::string render_models(const ServedModel& model, int64_t created) {
  JsonArray list;
  for (const std::string& name : model.names) list.add(model_json(model, name, created));
  const JsonObject out{{"object", "list"},
                       {"data", list},
                       {"has_more", false},
                       {"first_id", model.names.front()},
                       {"last_id", model.names.back()}};
  return out.text();
}

Reply<std::string> render_model(const ServedModel& model, std::string_view name, int64_t created) {
  const auto found = std::find(model.names.begin(), model.names.end(), name);
  if (found == model.names.end()) return model_not_found(name, model.names);
  return model_json(model, *found, created).text();
}

std::string render_metrics(const ServerStats& stats) {
  const auto number = [](uint64_t value) { return static_cast<double>(value); };
  MetricsText text(stats.model);
  text.value("tessera_requests_running", "vllm:num_requests_running", "gauge", "Requests in the batch.",
             number(stats.num_running));
  text.value("tessera_requests_waiting", "vllm:num_requests_waiting", "gauge", "Requests that wait for room.",
             number(stats.num_waiting));
  text.value("tessera_waiting_prompt_tokens", "", "gauge", "Prompt tokens of the requests that wait.",
             number(stats.num_waiting_prompt_tokens));
  text.value("tessera_connections", "", "gauge", "Open connections.", number(stats.num_connections));
  text.value("tessera_streams", "", "gauge", "Answers that are being streamed.", number(stats.num_streams));
  text.value("tessera_cache_usage_ratio", "vllm:kv_cache_usage_perc", "gauge", "Share of cache pages in use, 0 to 1.",
             stats.cache_usage);
  text.value("tessera_cache_bytes", "", "gauge", "Bytes of cache in use.", number(stats.cache_bytes));
  text.value("tessera_resident_bytes", "", "gauge", "Resident memory of the process.", number(stats.resident_bytes));
  text.value("tessera_prompt_tokens_total", "vllm:prompt_tokens_total", "counter", "Prompt tokens of requests.",
             number(stats.num_prompt_tokens));
  text.value("tessera_generated_tokens_total", "vllm:generation_tokens_total", "counter", "Tokens that were sampled.",
             number(stats.num_generated_tokens));
  text.value("tessera_steps_total", "", "counter", "Steps of the engine.", number(stats.num_steps));
  text.value("tessera_step_seconds_total", "", "counter", "Seconds of those steps.", stats.step_seconds);
  text.value("tessera_model_seconds_total", "", "counter", "Seconds of them in the model; the rest is the engine's.",
             stats.model_seconds);
  text.value("tessera_preemptions_total", "vllm:num_preemptions_total", "counter",
             "Requests put back to make room for others.", number(stats.num_preemptions));
  text.value("tessera_prefix_cache_queries_total", "vllm:prefix_cache_queries_total", "counter",
             "Prompt tokens looked up in the prefix cache.", number(stats.num_prefix_queries));
  text.value("tessera_prefix_cache_hits_total", "vllm:prefix_cache_hits_total", "counter",
             "Prompt tokens found in the prefix cache.", number(stats.num_prefix_hits));
  text.family("tessera_prefix_cache_lookups_total", "counter", "Requests looked up in the prefix cache, by result.");
  text.sample("tessera_prefix_cache_lookups_total", number(stats.num_prefix_found), "result=\"hit\"");
  text.sample("tessera_prefix_cache_lookups_total", number(stats.num_prefix_lookups - stats.num_prefix_found),
              "result=\"miss\"");
  text.value("tessera_prefix_cache_snapshots", "", "gauge", "Snapshots in the prefix cache.",
             number(stats.num_snapshots));
  text.value("tessera_prefix_cache_bytes", "", "gauge", "Bytes that snapshots take, with the pages that they share.",
             number(stats.snapshot_bytes));
  text.value("tessera_prefix_cache_usage_ratio", "", "gauge", "Share of the prefix cache's budget in use, 0 to 1.",
             stats.snapshot_usage);
  text.value("tessera_prefix_cache_insertions_total", "", "counter", "Snapshots that were kept.",
             number(stats.num_snapshots_kept));
  text.value("tessera_prefix_cache_evictions_total", "", "counter", "Snapshots that were given up.",
             number(stats.num_snapshots_evicted));
  render_tiers(stats.tiers, text);
  text.value("tessera_replay_hits_total", "", "counter", "Past tool calls put back as they were sampled.",
             number(stats.num_replay_hits));
  text.value("tessera_replay_misses_total", "", "counter", "Past tool calls that had to be written anew.",
             number(stats.num_replay_misses));

  for (const std::string_view name : {"tessera_requests_finished_total", "vllm:request_success_total"}) {
    const bool is_ours = name.starts_with("tessera");
    text.family(name, "counter", "Requests that ended, by reason.");
    for (const ServerStats::Finished& item : stats.finished) {
      text.sample(name, number(item.count),
                  fmt::format("{}={}", is_ours ? "reason" : "finished_reason", label(item.reason)));
    }
  }
  text.family("tessera_http_responses_total", "counter", "Answers by route and status.");
  for (const ServerStats::Answered& item : stats.answered) {
    text.sample("tessera_http_responses_total", number(item.count),
                fmt::format("route={},status=\"{}\"", label(item.route), item.status));
  }
  text.histogram("tessera_time_to_first_token_seconds", "vllm:time_to_first_token_seconds",
                 "From a request's arrival to its first token.", stats.first_token);
  text.histogram("tessera_inter_token_seconds", "vllm:inter_token_latency_seconds", "Between tokens of one choice.",
                 stats.between_tokens);
  text.histogram("tessera_request_seconds", "vllm:e2e_request_latency_seconds",
                 "From a request's arrival to its last token.", stats.whole_request);
  text.histogram("tessera_queue_seconds", "vllm:request_queue_time_seconds",
                 "From a request's arrival to its first step.", stats.in_queue);
  return text.take();
}

}  // namespace tessera::server
