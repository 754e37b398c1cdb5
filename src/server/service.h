// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the routes do, without a socket: an exchange is opened for each request, workers prepare it, the engine runs it.
// Requests with grammars that are not known yet are prepared in a lane of their own.
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/log.h"
#include "engine/engine.h"
#include "engine/prefix_tier.h"
#include "server/compiling_lane.h"
#include "server/exchange.h"
#include "server/figures.h"
#include "server/ids.h"
#include "server/prepare.h"
#include "server/replay_store.h"
#include "server/routes.h"
#include "server/worker_pool.h"

namespace tessera::server {

// A request's body as it came, in order.
using BodyPieces = std::vector<std::string>;

struct ServiceOptions {
  int num_workers = 2;
  size_t max_preparing = 256;              // requests that wait for a worker; more are refused with 429
  size_t max_compiling = 8;                // different new grammars at a time; who asks for one more gets 429
  size_t replay_bytes = size_t{64} << 20;  // of remembered tool calls
  std::string page;                        // HTML of GET /
  // Of the prefix cache, for /metrics; they must outlive the service.
  std::vector<const engine::PrefixTier*> tiers;
};

class Service {
 public:
  // Engine, figures and log (null: none) must outlive it; the tokenizer of `serving` too.
  Service(Serving serving, engine::Engine& engine, Figures& figures, ServiceOptions options, LogSink* log);

  // A request with its whole body, or none; a worker puts it together. `name` is what find_route gave. Thread-safe;
  // does not wait. The service
  // must outlive what is opened until its last call of the waker.
  std::shared_ptr<Exchange> open(const Route& route, std::string_view name, BodyPieces body, const Caller& caller,
                                 std::weak_ptr<Waker> waker);
  // No more requests are taken.
  void set_draining() { is_draining_ = true; }
  Health health() const;
  const Serving& serving() const { return serving_; }
  engine::Engine& engine() { return engine_; }

 private:
  class Preparation;
  class Room;

  // Leaves `preparation`'s request to the lane of grammars where its grammar is new.
  void prepare(Preparation& preparation) noexcept;
  void refuse_now(Exchange& exchange) noexcept;
  void check_deeply(Exchange& exchange);
  std::string metrics() const;

  const Serving serving_;
  engine::Engine& engine_;
  const ServiceOptions options_;
  LogSink* const log_;
  std::atomic<bool> is_draining_{false};
  RandomIds ids_;
  ReplayStore replay_;
  Figures& figures_;
  const Preparer preparer_;
  CompilingLane compilers_;  // a new grammar may take seconds, and only other new ones wait for it
  WorkerPool workers_;       // last: its jobs use all else
};

}  // namespace tessera::server
