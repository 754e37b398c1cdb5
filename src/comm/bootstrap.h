// SPDX-License-Identifier: Apache-2.0
#pragma once
// How ranks find each other, and learn that one is lost or has failed. Rank 0 listens; the others come to it and prove
// that they know the secret. A thread keeps the connections and sends heartbeats until leave().
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/log.h"
#include "comm/rank_place.h"
#include "comm/tcp.h"

namespace tessera::comm {

// Told once that a rank is lost or has failed, from the bootstrap's thread, or from the one that calls end_group(). A
// program says so and ends: collectives that wait for that rank never return by themselves.
class LossSink {
 public:
  virtual ~LossSink() = default;
  // Begins with kLostRank or with failed_rank(): "lost rank 2 of 4 (10.0.0.7 port 41822): silent for 15 s", "rank 2 of
  // 4 failed: out of memory".
  virtual void lost(int rank, const std::string& message) = 0;
};
constexpr std::string_view kLostRank = "lost ";
// "rank 2 of 4 failed: ", before what the rank said; of long words others hear the beginning.
std::string failed_rank(int rank, size_t world);

// Asked by rank 0 while it waits for others: for ranks that it started and that have ended, or for its own end.
class JoinWatch {
 public:
  virtual ~JoinWatch() = default;
  // Why not all will meet, which those who are there are told; empty: they may.
  virtual std::string fault() = 0;
};

struct BootstrapOptions {
  RankPlace place;
  std::string secret;  // at least kLeastSecretBytes
  // Where rank 0 listens; "*": every network. Empty: at place.address, but for a name that leads to the loopback of
  // this machine only, where nobody else would find it: then every network.
  std::string listen_address;
  std::string listen_source;  // who said so, for errors
  JoinWatch* watch = nullptr;
  double join_seconds = 300;
  double heartbeat_seconds = 1;
  double lost_seconds = 15;  // silence that makes a rank a lost one
  // May be null. Once it is true, since somebody waits for the end, silence of 5 s is enough.
  const std::atomic<bool>* is_ending = nullptr;
};

constexpr size_t kLeastSecretBytes = 16;

// For a rank that fails before it has a Bootstrap: whoever is there or comes within 5 s learns why, and ends, instead
// of waiting for it. Others than rank 0 tell that one, which passes it on; this returns when it is sent, or rank 0 is
// not found within join_seconds. Rank 0 listens itself; this returns when all have come, or after 5 s or join_seconds.
void tell_others(const BootstrapOptions& options, const std::string& why) noexcept;

class Bootstrap {
 public:
  // Returns when all ranks are there. `log` may be null; `sink` too: then calls throw. Both outlive this. Rank 0 may
  // bring the socket at which it listens already. Throws kInvalidArgument for a secret that is too short; kDeviceError,
  // on every rank that is there, where ranks are missing after join_seconds, naming them, or rank 0 is not found or
  // does not know the secret. Whoever comes without it costs one line of the log.
  Bootstrap(const BootstrapOptions& options, LogSink* log, LossSink* sink, Socket listener = {});
  ~Bootstrap();  // as leave(), without throwing

  int rank() const;
  int world() const;
  // Bytes of every rank, on every rank, by rank. All call it, in the same order. Throws kDeviceError where a rank is
  // lost, or has left, before it has sent its bytes, or has not within `limit_seconds` (0: no limit), naming it.
  std::vector<std::vector<uint8_t>> all_gather(std::span<const uint8_t> bytes, double limit_seconds = 0);
  // Bytes of rank 0, on every rank.
  std::vector<uint8_t> broadcast(std::span<const uint8_t> bytes);
  // Rank 0: bytes to every other rank, which takes them in order, apart from all_gather; returns at once. Throws as
  // all_gather.
  void send_order(std::span<const uint8_t> bytes);
  // Every other rank: the next ones, whenever they come (`limit_seconds` 0) or in time. Throws as all_gather.
  std::vector<uint8_t> take_order(double limit_seconds = 0);
  // How many orders rank 0 has sent, or this rank has taken: the same on all that are at the same one. Any thread.
  uint64_t num_orders() const;
  // Throws kDeviceError where a rank is lost or has failed. From any thread.
  void check();
  // This rank can't go on: every other learns why ("rank 1 of 2 failed: WHY"), and ends. Returns when that is sent.
  void fail(const std::string& why) noexcept;
  // The same for a part of the program that can't end it: this rank's sink learns it too, or what ended the group
  // before.
  void end_group(const std::string& why) noexcept;
  // Ends as it should: nobody counts this rank as lost. Returns when its farewell is sent.
  void leave();

 private:
  class Member;
  std::unique_ptr<Member> member_;
};

}  // namespace tessera::comm
