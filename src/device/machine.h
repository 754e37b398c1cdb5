// SPDX-License-Identifier: Apache-2.0
#pragma once
// What this machine is: probed once, passed to whoever chooses.
#include <cstdint>
#include <string>

namespace tessera::device {

struct Machine {
  std::string cpu_name;
  int num_cores = 1;  // that this process may use
  uint64_t memory_total_bytes = 0;
  uint64_t memory_available_bytes =
      0;  // the least of: what the kernel says, the control group's limit, the address-space limit
};

// Cores that this process may use: those of its affinity, at most its control group's share; at least 1.
int usable_cores();

Machine probe_machine();

}  // namespace tessera::device
