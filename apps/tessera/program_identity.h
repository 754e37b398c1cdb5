// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which program this is, down to its bits.
#include <string>

namespace tessera::app {

// A hash of this program's own file, and the C library. Kernels of another build may have other bits, whatever its
// version says; so may the C library's exp and log.
std::string program_identity();

}  // namespace tessera::app
