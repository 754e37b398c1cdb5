// SPDX-License-Identifier: Apache-2.0
#pragma once
// The emulated GPU runs every instruction that it knows; what it says of itself decides which backends take it.

namespace tessera::device::emulated {

// From now on; 9.0 before.
void set_compute_capability(int major, int minor);

}  // namespace tessera::device::emulated
