// SPDX-License-Identifier: Apache-2.0
#include "testing/test_machine.h"

#include "base/env.h"
#include "device/device_choice.h"

namespace tessera::testing {

device::Machine test_machine() {
  return device::machine_of(env_value("TESSERA_DEVICE").value_or("cpu"));
}

}  // namespace tessera::testing
