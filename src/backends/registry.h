// SPDX-License-Identifier: Apache-2.0
#pragma once
// The backends that this program was built with.
#include <span>

#include "ops/backend.h"

namespace tessera::backends {

// Best first; the reference last.
std::span<const ops::Backend* const> all_backends();

}  // namespace tessera::backends
