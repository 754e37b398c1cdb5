// SPDX-License-Identifier: Apache-2.0
#pragma once
// The GPU of a test that has nothing to say where there is none.
#include <memory>
#include <string>

#include "base/error.h"
#include "device/device_choice.h"
#include "device/executor.h"

namespace tessera::testing {

// Null where there is no GPU, for GTEST_SKIP() << why_not.
inline std::unique_ptr<device::Executor> any_gpu(std::string& why_not) try {
  return device::make_executor(device::machine_of("cuda"), 1);
} catch (const Error& error) {
  why_not = error.what();
  return nullptr;
}

}  // namespace tessera::testing
