// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the control groups that this process is in leave it: a container's, a service's, a batch job's. Versions 1 and 2
// (cgroups(7)); a limit of any group around a group holds too.
#include <cstdint>
#include <limits>
#include <string>

namespace tessera::device {

struct GroupLimits {
  // Of the group with least left: its limit without what is used, of which the system can give back file contents that
  // nobody used lately.
  uint64_t memory_left_bytes = std::numeric_limits<uint64_t>::max();
  double processors = std::numeric_limits<double>::infinity();  // share of processor time, in processors
};

// Of the process whose /proc/self lies under `root` ("" on a real machine). What can't be read is no limit.
GroupLimits read_group_limits(const std::string& root = "");

}  // namespace tessera::device
