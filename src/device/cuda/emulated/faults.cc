// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/emulated/faults.h"

#include <functional>
#include <map>
#include <mutex>

namespace tessera::device::emulated {

namespace {

struct Armed {
  std::mutex mutex;  // guards all below
  bool is_armed = false;
  Fault fault;
  int64_t num_counted = 0;                            // that `fault` names
  std::map<std::string, int64_t, std::less<>> calls;  // by name
  std::string failed;
};

Armed& armed() {
  static Armed& one = *new Armed;  // outlives whoever gives memory back at the program's end
  return one;
}

void rearm(const Fault* fault) {
  const std::scoped_lock lock(armed().mutex);
  armed().is_armed = fault != nullptr;
  armed().fault = fault != nullptr ? *fault : Fault{};
  armed().num_counted = 0;
  armed().calls.clear();
  armed().failed.clear();
}

}  // namespace

void arm(const Fault& fault) {
  rearm(&fault);
}

void disarm() {
  rearm(nullptr);
}

int64_t num_calls(std::string_view prefix) {
  const std::scoped_lock lock(armed().mutex);
  int64_t count = 0;
  for (const auto& [name, times] : armed().calls) count += name.starts_with(prefix) ? times : 0;
  return count;
}

std::string failed_call() {
  const std::scoped_lock lock(armed().mutex);
  return armed().failed;
}

cudaError_t fault_of(std::string_view call, bool& is_lost) {
  Armed& now = armed();
  const std::scoped_lock lock(now.mutex);
  is_lost = false;
  const auto counted = now.calls.find(call);
  ++(counted != now.calls.end() ? counted->second : now.calls[std::string(call)]);
  if (!call.starts_with(now.fault.only)) return cudaSuccess;
  const int64_t since = ++now.num_counted - now.fault.nth;
  if (!now.is_armed || since < 0 || since >= now.fault.count) return cudaSuccess;
  if (now.failed.empty()) now.failed = call;
  is_lost = now.fault.count == kForEver;
  return now.fault.code;
}

}  // namespace tessera::device::emulated
