// SPDX-License-Identifier: Apache-2.0
#include "device/machine.h"

#include <cpuid.h>
#include <fmt/format.h>
#include <immintrin.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <thread>

#include "base/env.h"
#include "base/error.h"
#include "base/strings.h"
#include "device/control_group.h"
#include "device/thread_affinity.h"

namespace tessera::device {

namespace {

// The value of a line "Name:   123 kB" of /proc/meminfo or /proc/self/status, in bytes.
uint64_t proc_bytes(const char* path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(name + ":")) return std::strtoull(line.c_str() + name.size() + 1, nullptr, 10) * 1024;
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
  return std::nullopt;
}

// Register state that the operating system saves; only to be called where CPUID reports OSXSAVE.
__attribute__((target("xsave"))) uint64_t saved_state() {
  return _xgetbv(0);
}

// Tiles are off until a process asks for them (Linux 5.16 and later; arch_prctl(2), ARCH_REQ_XCOMP_PERM).
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Bits by Intel SDM volume 2A, CPUID, and volume 1, 13.1 (XCR0).
CpuFeatures cpu_features() {
  struct Leaf {
    unsigned a = 0, b = 0, c = 0, d = 0;
  } one, seven, seven_one;
  CpuFeatures found;
  if (__get_cpuid(1, &one.a, &one.b, &one.c, &one.d) == 0 ||
      __get_cpuid_count(7, 0, &seven.a, &seven.b, &seven.c, &seven.d) == 0) {
    return found;
  }
  if (seven.a >= 1) __get_cpuid_count(7, 1, &seven_one.a, &seven_one.b, &seven_one.c, &seven_one.d);
  const auto has = [](unsigned word, std::initializer_list<int> bits) {
    return std::all_of(bits.begin(), bits.end(), [&](int bit) { return (word >> bit & 1) != 0; });
  };
  if (!has(one.c, {27})) return found;  // OSXSAVE
  const uint64_t state = saved_state();
  const auto saves = [&](uint64_t bits) { return (state & bits) == bits; };
  found.avx2 = saves(0x6) && has(one.c, {12, 28, 29}) && has(seven.b, {5});  // FMA, AVX, F16C; AVX2
  found.avx512 = found.avx2 && saves(0xE6) && has(seven.b, {16, 17, 30, 31}) && has(seven.c, {1});  // F DQ BW VL; VBMI
  found.avx512_bf16 = found.avx512 && has(seven_one.a, {5});
  found.amx_bf16 = found.avx512_bf16 && saves(0x60000) && has(seven.d, {22, 24}) && may_use_tiles();
  return found;
}

}  // namespace

int usable_cores() {
  const size_t allowed = unpinned_affinity().size();  // 0 where the system does not say
  const int cores = std::max(1, static_cast<int>(allowed > 0 ? allowed : std::thread::hardware_concurrency()));
  return std::max(1, static_cast<int>(std::min<double>(std::ceil(read_group_limits().processors), cores)));
}

uint64_t peak_memory_bytes() {
  return proc_bytes("/proc/self/status", "VmHWM");
}

Machine probe_machine() {
  Machine machine;
  machine.cpu_name = cpu_model_name();
  machine.num_cores = usable_cores();
  machine.memory_total_bytes = proc_bytes("/proc/meminfo", "MemTotal");
  uint64_t available = std::min(proc_bytes("/proc/meminfo", "MemAvailable"), read_group_limits().memory_left_bytes);
  rlimit address_space{};
  if (getrlimit(RLIMIT_AS, &address_space) == 0 && address_space.rlim_cur != RLIM_INFINITY) {
    // What is mapped already counts against the limit: the first number of statm, in pages.
    const uint64_t mapped = number_in("/proc/self/statm").value_or(0) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    available = std::min<uint64_t>(available, address_space.rlim_cur > mapped ? address_space.rlim_cur - mapped : 0);
  }
  if (const auto pretended = env_value("TESSERA_MEMORY_BYTES")) {
    const char* end = pretended->data() + pretended->size();
    const auto [stop, error] = std::from_chars(pretended->data(), end, available);
    if (error != std::errc() || stop != end) {
      fail(ErrorCode::kInvalidArgument,
           fmt::format("TESSERA_MEMORY_BYTES: expected a number of bytes, found \"{}\"", printable(*pretended, 40)));
    }
  }
  machine.memory_available_bytes = available;
  machine.cpu = cpu_features();
  machine.backends = env_value("TESSERA_BACKENDS").value_or("");
  return machine;
}

}  // namespace tessera::device
