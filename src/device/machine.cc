// SPDX-License-Identifier: Apache-2.0
#include "device/machine.h"

#include <omp.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <optional>

#include "base/env.h"

namespace tessera::device {

namespace {

// The value in KiB of a line "Name:   123 kB" of /proc/meminfo, in bytes.
uint64_t meminfo_bytes(const std::string& name) {
  std::ifstream file("/proc/meminfo");
  std::string key, unit;
  uint64_t value = 0;
  while (file >> key >> value) {
    std::getline(file, unit);
    if (key == name + ":") return value * 1024;
  }
  return 0;
}

std::string cpu_model_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(std::min(line.size(), line.find(':') + 2));
  }
  return "unknown";
}

std::optional<uint64_t> number_in(const char* path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // absent, or "max"
}

}  // namespace

Machine probe_machine() {
  Machine machine;
  machine.cpu_name = cpu_model_name();
  machine.num_cores = std::max(1, omp_get_num_procs());
  machine.memory_total_bytes = meminfo_bytes("MemTotal");
  uint64_t available = meminfo_bytes("MemAvailable");
  // Control group v2 as seen from inside a container; usage counts against the limit.
  if (const auto limit = number_in("/sys/fs/cgroup/memory.max")) {
    const uint64_t used = number_in("/sys/fs/cgroup/memory.current").value_or(0);
    available = std::min(available, *limit > used ? *limit - used : 0);
  }
  rlimit address_space{};
  if (getrlimit(RLIMIT_AS, &address_space) == 0 && address_space.rlim_cur != RLIM_INFINITY) {
    available = std::min<uint64_t>(available, address_space.rlim_cur);
  }
  if (const auto pretended = env_value("TESSERA_MEMORY_BYTES")) {
    available = std::strtoull(pretended->c_str(), nullptr, 10);
  }
  machine.memory_available_bytes = available;
  return machine;
}

}  // namespace tessera::device
