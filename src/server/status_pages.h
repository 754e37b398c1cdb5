// SPDX-License-Identifier: Apache-2.0
#pragma once
// What /health, /v1/models and /metrics answer.
#include <cstdint>
#include <string>
#include <string_view>

#include "server/api_error.h"
#include "server/request.h"
#include "server/stats.h"

namespace tessera::server {

// Of /health/live, {"status": "live", "uptime_seconds"}: whoever answers lives, ready or not.
std::string render_liveness(double uptime_seconds);
// 200 where the server is ready, else 503.
int health_status(const Health& health);
// {"status", "detail", "uptime_seconds", "check_seconds"}.
std::string render_health(const Health& health);

// /v1/models: a list that OpenAI's and Anthropic's clients both read. `created` in seconds since 1970.
std::string render_models(const ServedModel& model, int64_t created);
// /v1/models/NAME; 404 for names that are not served.
Reply<std::string> render_model(const ServedModel& model, std::string_view name, int64_t created);

// /metrics in Prometheus' text format, version 0.0.4. Names begin with tessera_; those that dashboards and load tools
// for vLLM read come again as vllm:. Source: prometheus.io, exposition formats; docs of vLLM, metrics.
std::string render_metrics(const ServerStats& stats);

}  // namespace tessera::server
