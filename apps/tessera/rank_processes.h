// SPDX-License-Identifier: Apache-2.0
#pragma once
// The further ranks of a program that starts its own: processes of the same program with the same arguments.
#include <sys/types.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/bootstrap.h"
#include "rank_ends.h"

namespace tessera::app {

constexpr uint64_t kMaxSecretBytes = 4096;

class RankProcesses final : public comm::JoinWatch {
 public:
  RankProcesses() = default;
  ~RankProcesses() override { end(0); }
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  // Starts ranks 1 to world - 1 of this machine, which find rank 0 at 127.0.0.1 and `port`, and know `secret`. Throws
  // kResourceExhausted. From the main thread, before this process has others: they end with it until they call
  // outlive_rank_0().
  void start(const std::string& verb, int world, int port, const std::string& secret);
  // Where one has ended the others are killed: they hold nothing yet, and would say that rank 0 has closed its door.
  std::string fault() override;
  // Waits until all have ended, at most so long; then kills those that are left, and waits a second for them: one whose
  // GPU is lost may be inside the driver, where no signal reaches it. From any thread, once they were started.
  void end(double seconds) noexcept;
  // Of those that failed, once they have ended: what they handed over, or their exit code alone.
  std::vector<RankEnd> ends();
  // Kills them without waiting. From any thread, once they were started.
  void abandon() noexcept;

 private:
  struct Process {
    int rank;
    pid_t id;  // 0: has ended
    int status = 0;
  };
  bool has_ended(Process& process) noexcept;  // lock_ held
  std::string first_end();
  // Whether all had ended in time.
  bool wait(double seconds) noexcept;
  std::mutex lock_;  // a number belongs to another process as soon as its end has been asked for
  std::vector<Process> processes_;
  comm::Socket words_;  // the end of a pipe at which their last words come out
  int world_ = 0;
};

// In a rank that RankProcesses started.
struct Inheritance {
  std::string secret;
  comm::Socket words;  // the pipe's other end, for hand_over()
};
// Out of `file`, whose descriptor is closed. Nothing where `file` is another's.
std::optional<Inheritance> inheritance(const std::string& file);
// In the same: from now on it ends by itself where rank 0 does, and says why.
void outlive_rank_0();

}  // namespace tessera::app
