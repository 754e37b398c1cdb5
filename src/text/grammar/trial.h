// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tries work on a definition in a process of its own, where its time and memory can be limited: a definition from
// outside may be built to use up either, or a stack.
#include <sys/types.h>

#include <cstddef>
#include <mutex>
#include <string>

#include "text/grammar/definition.h"

namespace tessera::text {

class TrialWork {
 public:
  virtual ~TrialWork() = default;
  // In the other process. What it throws but bad_alloc is no business of the trial's.
  virtual void run(const GrammarDefinition& definition) const = 0;
};

struct TrialLimits {
  int seconds = 2;                   // of processor time; four times that of the clock's
  size_t bytes = size_t{256} << 20;  // beyond what the process has; not in builds with sanitizers
};

// Thread-safe; one trial at a time.
class Trial {
 public:
  // Forks: threads of this process that hold locks of the library's own allocators excepted, none matter to it. Make it
  // before the process is large. `work` must outlive it.
  Trial(const TrialWork& work, const TrialLimits& limits);
  ~Trial();
  Trial(const Trial&) = delete;
  Trial& operator=(const Trial&) = delete;

  // Throws kInvalidArgument, naming the limit, where the work met one or crashed; kResourceExhausted where there is no
  // process to try it in, or the clock's limit came before that of processor time.
  void run(const GrammarDefinition& definition);

 private:
  void start();
  void stop();

  const TrialWork& work_;
  const TrialLimits limits_;
  std::mutex lock_;
  pid_t process_ = -1;
  int socket_ = -1;
};

}  // namespace tessera::text
