// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which processor computes, by the name that users give it.
#include <string>

#include "device/machine.h"

namespace tessera::device {

// The probed machine with `gpu` and the free memory there set for "cuda" or "cuda:N"; for "cpu" as it is. Throws
// kInvalidArgument for another name, kUnsupported or kDeviceError with the reason where that GPU can't be used.
Machine machine_of(const std::string& device);

}  // namespace tessera::device
