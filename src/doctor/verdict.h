// SPDX-License-Identifier: Apache-2.0
#pragma once
// A report in words.
#include <string>

#include "doctor/deep_check.h"

namespace tessera::doctor {

// What is wrong, which tensor, what to do; or that nothing was found, and what could not be judged.
std::string verdict_of(const DeepReport& report);

}  // namespace tessera::doctor
