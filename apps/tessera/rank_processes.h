// SPDX-License-Identifier: Apache-2.0
#pragma once
// The further ranks of a program that starts its own: processes of the same program with the same arguments.
#include <sys/types.h>

#include <string>
#include <vector>

#include "comm/bootstrap.h"

namespace tessera::app {

class RankProcesses final : public comm::JoinWatch {
 public:
  RankProcesses() = default;
  ~RankProcesses() override { end(0); }
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  // Starts ranks 1 to world - 1 of this machine, which find rank 0 at 127.0.0.1 and `port`, and know `secret`. Throws
  // kResourceExhausted. Before this process has threads.
  void start(const std::string& verb, int world, int port, const std::string& secret);
  std::string fault() override;
  // Waits until all have ended, at most so long; then ends those that are left.
  void end(double seconds) noexcept;

 private:
  struct Process {
    int rank;
    pid_t id;  // 0: has ended
    int status = 0;
  };
  bool has_ended(Process& process) noexcept;
  std::vector<Process> processes_;
  int world_ = 0;
};

}  // namespace tessera::app
