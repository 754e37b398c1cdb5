// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "device/machine.h"

namespace tessera::testing {

// The machine with the device that TESSERA_DEVICE names: the same tests prove the model on a GPU.
device::Machine test_machine();

}  // namespace tessera::testing
