// SPDX-License-Identifier: Apache-2.0
#include "server/service.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <fstream>
#include <new>
#include <utility>

#include "base/strings.h"
#include "server/openapi.h"
#include "server/status_pages.h"

namespace tessera::server {

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Of this process; 0 where the system does not say.
uint64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  uint64_t pages = 0, resident = 0;
  file >> pages >> resident;
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

// Thrown by the check of room, through the preparation.
class RoomRefused : public RequestError {
 public:
  RoomRefused(ApiError error, int64_t retry_after_seconds)
      : RequestError(std::move(error)), retry_after_seconds_(retry_after_seconds) {}
  int64_t retry_after_seconds() const { return retry_after_seconds_; }

 private:
  int64_t retry_after_seconds_;
};

// Of a grammar, at the least; a full lane takes some of them.
constexpr int64_t kCompilingRetrySeconds = 2;

ApiError full(std::string message) {
  ApiError error;
  error.status = 429;
  error.type = "rate_limit_error";
  error.code = "overloaded";
  error.message = std::move(message);
  return error;
}

// The answer of /health/deep, once the engine has drawn its token.
class HealthWriter final : public AnswerWriter {
 public:
  explicit HealthWriter(Health health) : health_(std::move(health)), began_(now()) {}
  std::string whole(std::span<const FinishedAnswer>, const Usage&) override {
    health_.deep_seconds = now() - began_;
    return render_health(health_);
  }
  std::string begin(int, const Usage&) override { return ""; }
  std::string delta(int, const AnswerDelta&) override { return ""; }
  std::string end(int, const AnswerDelta&, const FinishedAnswer&) override { return ""; }
  std::string done(const Usage&) override { return ""; }
  std::string error(const ApiError&) override { return ""; }
  std::string keep_alive() const override { return ""; }

 private:
  Health health_;
  double began_;
};

bool generates(RouteKind kind) {
  return kind == RouteKind::kChat || kind == RouteKind::kCompletions || kind == RouteKind::kResponses ||
         kind == RouteKind::kMessages;
}

}  // namespace

class Service::Room final : public Preparer::RoomCheck {
 public:
  explicit Room(const engine::Engine& engine) : engine_(engine) {}
  void check(int64_t num_tokens) const override {
    const std::optional<engine::Refusal> refusal = engine_.check_room(num_tokens);
    if (!refusal) return;
    if (refusal->reason == engine::Refusal::Reason::kDraining) throw RoomRefused(unavailable("draining"), 0);
    throw RoomRefused(full(refusal->message), std::max<int64_t>(1, refusal->retry_after_seconds));
  }

 private:
  const engine::Engine& engine_;
};

class Service::Preparation final : public Job {
 public:
  Preparation(Service& its_service, const Route& its_route, BodyPieces its_body, Caller its_caller,
              std::shared_ptr<Exchange> its_exchange, Compiling its_compiling)
      : service(its_service),
        route(its_route),
        body(std::move(its_body)),
        caller(std::move(its_caller)),
        exchange(std::move(its_exchange)),
        compiling(its_compiling) {}
  void run() noexcept override { service.prepare(*this); }
  // The body, which is one piece from then on.
  const std::string& whole_body() {
    if (body.empty()) body.emplace_back();
    size_t num_bytes = 0;
    for (const std::string& piece : body) num_bytes += piece.size();
    body.front().reserve(num_bytes);
    for (size_t i = 1; i < body.size(); ++i) body.front() += body[i];
    body.resize(1);
    return body.front();
  }

  Service& service;
  const Route& route;
  BodyPieces body;
  const Caller caller;
  const std::shared_ptr<Exchange> exchange;
  const Compiling compiling;
  std::string grammar;  // the key of the one that it waits for in the lane
};

Service::Service(Serving serving, engine::Engine& engine, Figures& figures, ServiceOptions options, LogSink* log)
    : serving_(std::move(serving)),
      engine_(engine),
      options_(std::move(options)),
      log_(log),
      replay_(options_.replay_bytes),
      figures_(figures),
      preparer_(serving_, replay_, ids_),
      compilers_(options_.max_compiling, options_.max_preparing),
      workers_(options_.num_workers, options_.max_preparing) {}

Health Service::health() const {
  Health health;
  health.uptime_seconds = figures_.uptime_seconds();
  const engine::Engine::Status status = engine_.status();
  health.readiness = is_draining_ || status.is_draining ? Readiness::kDraining : Readiness::kReady;
  if (!status.fault.empty()) {
    health.readiness = Readiness::kFailed;
    health.detail = status.fault;
  }
  return health;
}

std::string Service::metrics() const {
  ServerStats stats = figures_.snapshot(engine_.status());
  stats.model = serving_.model.names.front();
  stats.resident_bytes = resident_bytes();
  for (const engine::PrefixTier* tier : options_.tiers) {
    const engine::TierStats of = tier->stats();
    const auto count = [](int64_t value) { return static_cast<uint64_t>(value); };
    stats.tiers.push_back({.name = of.name,
                           .num_snapshots = count(of.num_snapshots),
                           .bytes = count(of.bytes),
                           .total_bytes = count(of.total_bytes),
                           .num_hits = count(of.num_hits),
                           .num_hit_tokens = count(of.num_hit_tokens),
                           .num_stored = count(of.num_stored),
                           .num_evicted = count(of.num_evicted),
                           .num_dropped = count(of.num_dropped),
                           .num_faults = count(of.num_faults)});
  }
  const ReplayStore::Stats replay = replay_.stats();
  stats.num_replay_hits = replay.num_hits;
  stats.num_replay_misses = replay.num_misses;
  return render_metrics(stats);
}

std::shared_ptr<Exchange> Service::open(const Route& route, std::string_view name, BodyPieces body,
                                        const Caller& caller, std::weak_ptr<Waker> waker) {
  const ExchangeContext context{serving_, engine_, replay_, ids_, figures_};
  auto exchange = std::make_shared<Exchange>(context, route.errors, std::move(waker));
  switch (route.kind) {
    case RouteKind::kModels:
      exchange->reply({}, render_models(serving_.model, serving_.created));
      return exchange;
    case RouteKind::kModel: {
      Reply<std::string> reply = render_model(serving_.model, name, serving_.created);
      reply.ok() ? exchange->reply({}, std::move(reply.value())) : exchange->refuse(reply.error());
      return exchange;
    }
    case RouteKind::kHealth:
    case RouteKind::kLive:
      exchange->reply({}, render_liveness(figures_.uptime_seconds()));
      return exchange;
    case RouteKind::kReady: {
      const Health health = this->health();
      exchange->reply({health_status(health), "application/json", false, 0}, render_health(health));
      return exchange;
    }
    case RouteKind::kMetrics:
      exchange->reply({200, "text/plain; version=0.0.4; charset=utf-8", false, 0}, metrics());
      return exchange;
    case RouteKind::kOpenapi:
      exchange->reply({}, render_openapi(serving_.version));
      return exchange;
    case RouteKind::kPage:
      exchange->reply({200, "text/html; charset=utf-8", false, 0}, options_.page);
      return exchange;
    case RouteKind::kDeep:
      check_deeply(*exchange);
      return exchange;
    default:
      break;
  }
  if (generates(route.kind)) {
    try {
      Room(engine_).check(1);
    } catch (const RoomRefused& refused) {
      exchange->refuse(refused.error(), refused.retry_after_seconds());
      return exchange;
    }
  }
  if (!workers_.add(
          std::make_unique<Preparation>(*this, route, std::move(body), caller, exchange, Compiling::kKnownOnly))) {
    exchange->refuse(overloaded("requests being prepared", options_.max_preparing, options_.max_preparing), 1);
  }
  return exchange;
}

void Service::check_deeply(Exchange& exchange) {
  const Health health = this->health();
  if (health_status(health) != 200) {
    return exchange.reply({health_status(health), "application/json", false, 0}, render_health(health));
  }
  PreparedAnswer check;
  engine::Request request;
  request.prompt = {serving_.bos_id};
  request.max_tokens = 1;
  request.priority = engine::Priority::kHigh;
  check.requests.push_back(std::move(request));
  check.options.is_chat = false;
  check.writer = std::make_unique<HealthWriter>(health);
  exchange.start(std::move(check));
}

void Service::prepare(Preparation& preparation) noexcept {
  const Route& route = preparation.route;
  Exchange& exchange = *preparation.exchange;
  try {
    // A client that gave up while it waited leaves the lane to others.
    if (preparation.compiling == Compiling::kAny && exchange.is_cancelled()) return;
    if (!preparation.grammar.empty() && compilers_.has_failed(preparation.grammar)) {
      return exchange.refuse(exhausted("a schema, pattern or set of tools that many ask for could not be compiled now"),
                             kExhaustedRetrySeconds);
    }
    if (!generates(route.kind)) {
      return exchange.reply({}, preparer_.answer(route.kind, preparation.whole_body(), preparation.caller));
    }
    PreparedAnswer prepared = preparer_.prepare(route.kind, preparation.whole_body(), preparation.caller, Room(engine_),
                                                preparation.compiling);
    if (log_ != nullptr && !prepared.ignored.empty()) {
      log_->write(LogLevel::kDebug, fmt::format("{}: ignored fields {}", route.path,
                                                printable(fmt::format("{}", fmt::join(prepared.ignored, ", ")))));
    }
    exchange.start(std::move(prepared));
  } catch (const GrammarUnknown& unknown) {
    try {
      auto waiting = std::make_unique<Preparation>(*this, route, std::move(preparation.body), preparation.caller,
                                                   preparation.exchange, Compiling::kAny);
      waiting->grammar = unknown.key();
      const CompilingLane::Added added = compilers_.add(unknown.key(), std::move(waiting));
      if (added != CompilingLane::Added::kYes) {
        const bool has_requests = added == CompilingLane::Added::kTooManyRequests;
        const size_t limit = has_requests ? options_.max_preparing : options_.max_compiling;
        exchange.refuse(overloaded(has_requests ? "requests whose schemas, patterns and tools are being compiled"
                                                : "different new schemas, patterns and tools being compiled",
                                   limit, limit),
                        kCompilingRetrySeconds);
      }
    } catch (...) {
      refuse_now(exchange);
    }
  } catch (const Error& error) {
    if (!preparation.grammar.empty() && error.code() == ErrorCode::kResourceExhausted) {
      compilers_.fail(preparation.grammar);
    }
    refuse_now(exchange);
  } catch (...) {
    refuse_now(exchange);
  }
}

// With the exception that is being handled.
void Service::refuse_now(Exchange& exchange) noexcept try {
  try {
    throw;
  } catch (const RoomRefused& refused) {
    exchange.refuse(refused.error(), refused.retry_after_seconds());
  } catch (const std::bad_alloc&) {
    exchange.refuse(exhausted("out of memory"), kExhaustedRetrySeconds);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kResourceExhausted) {
      return exchange.refuse(exhausted(error.what()), kExhaustedRetrySeconds);
    }
    exchange.refuse(error_of_request());
  }
} catch (...) {
  exchange.lose();
}

}  // namespace tessera::server
