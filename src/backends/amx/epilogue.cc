// SPDX-License-Identifier: Apache-2.0
#include "backends/cpu_common/epilogue.h"

#include "backends/amx/kernels.h"

namespace tessera::backends::amx {

void store(const cpu_common::StoreJob& job) {
  cpu_common::store_panels(job);
}
void gate(const cpu_common::GateJob& job) {
  cpu_common::gate_panels(job);
}

}  // namespace tessera::backends::amx
