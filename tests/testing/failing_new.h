// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace tessera::seams {

// Whether operator new asks the allocation seam (base/test_seams.h). Under ThreadSanitizer, and under clang's
// sanitizers, it does not: they have their own.
bool can_new_fail();

}  // namespace tessera::seams
