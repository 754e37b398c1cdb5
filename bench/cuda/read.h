// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a GPU's memory gives to a kernel that only reads.
#include <cstddef>

#include "device/queue.h"

namespace tessera::bench {

// Queues reading `bytes` (a multiple of 16) of device memory; `*sink` is a word on the device that depends on them.
void read_device_memory(const void* data, size_t bytes, unsigned* sink, const device::Queue& queue);

}  // namespace tessera::bench
