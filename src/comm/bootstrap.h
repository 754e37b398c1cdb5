// SPDX-License-Identifier: Apache-2.0
#pragma once
// How ranks find each other, and learn that one is lost. Rank 0 listens; the others come to it and prove that they know
// the secret. A thread keeps the connections and sends heartbeats until leave().
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/log.h"
#include "comm/rank_place.h"

namespace tessera::comm {

// Told once, from the bootstrap's thread, that a rank is lost. A program says so and ends: collectives that wait for
// that rank never return by themselves.
class LossSink {
 public:
  virtual ~LossSink() = default;
  // "rank 2 of 4 (10.0.0.7 port 41822): silent for 15 s"
  virtual void lost(int rank, const std::string& message) = 0;
};

struct BootstrapOptions {
  RankPlace place;
  std::string secret;  // at least kLeastSecretBytes
  double join_seconds = 300;
  double heartbeat_seconds = 1;
  double lost_seconds = 15;  // silence that makes a rank a lost one
};

constexpr size_t kLeastSecretBytes = 16;

class Bootstrap {
 public:
  // Returns when all ranks are there. `log` may be null; `sink` too: then calls throw. Both outlive this. Throws
  // kInvalidArgument for a secret that is too short; kDeviceError where ranks are missing after join_seconds, naming
  // them, or rank 0 is not found or does not know the secret. Whoever comes without it costs one line of the log.
  Bootstrap(const BootstrapOptions& options, LogSink* log, LossSink* sink);
  ~Bootstrap();  // as leave(), without throwing

  int rank() const;
  int world() const;
  // Bytes of every rank, on every rank, by rank. All call it, in the same order. Throws kDeviceError where a rank is
  // lost, or has left, before it has sent its bytes.
  std::vector<std::vector<uint8_t>> all_gather(std::span<const uint8_t> bytes);
  // Bytes of rank 0, on every rank.
  std::vector<uint8_t> broadcast(std::span<const uint8_t> bytes);
  // Ends as it should: nobody counts this rank as lost. Returns when its farewell is sent.
  void leave();

 private:
  class Member;
  std::unique_ptr<Member> member_;
};

}  // namespace tessera::comm
