// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory by the page, straight from the system.
#include <cstddef>

namespace tessera::device {

// A mapping of at least `bytes` zero bytes, aligned to a page; null where the system gives none. No page is there yet:
// whoever writes one first makes it, so the threads that fill a block zero it too. Pages lie where the calling thread's
// memory policy (InterleavedMemory, numactl) wants them, whichever thread writes first; where that can't be had, the
// calling thread writes all of them. Large pages are asked for.
void* map_zero_pages(size_t bytes);

// A mapping of map_zero_pages(bytes).
void unmap_pages(void* data, size_t bytes) noexcept;

}  // namespace tessera::device
