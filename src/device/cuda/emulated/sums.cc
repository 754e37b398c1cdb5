// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <atomic>

#include "base/env.h"
#include "base/error.h"
#include "base/strings.h"
#include "device/cuda/emulated/capability.h"

namespace tessera::device::emulated {

namespace {

bool asks_for_fast_sums() {
  const std::string mode = env_value("TESSERA_EMULATED_SUMS").value_or("exact");
  if (mode == "fast" || mode == "exact") return mode == "fast";
  fail(ErrorCode::kInvalidArgument,
       fmt::format("TESSERA_EMULATED_SUMS: expected exact or fast, found \"{}\"", printable(mode, 40)));
}

std::atomic<bool>& are_fast_now() {
  static std::atomic<bool> s_are_fast = asks_for_fast_sums();
  return s_are_fast;
}

}  // namespace

bool sums_are_fast() {
  return are_fast_now().load(std::memory_order_relaxed);
}

void set_sums_are_fast(bool are_fast) {
  are_fast_now().store(are_fast, std::memory_order_relaxed);
}

}  // namespace tessera::device::emulated
