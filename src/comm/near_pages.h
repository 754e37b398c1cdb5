// SPDX-License-Identifier: Apache-2.0
#pragma once
// Copies of what lies in other ranks' memory (shared_memory.h), for who is about to read it many times: a prompt's
// tokens attend the same entries, and nothing that comes over a link stays in a GPU's cache.
#include <cstdint>
#include <span>

#include "device/queue.h"

namespace tessera::comm {

// One cache of one layer, in pages of sequences. Addresses are of the memory of the queue's ops.
struct NearPages {
  const uint8_t* const* pages = nullptr;  // [places, stride]
  int64_t stride = 0;                     // most pages of a sequence
  int64_t offset = 0, part_bytes = 0;     // of a page, what the cache has of it: multiples of 16
  uint8_t** table = nullptr;              // [places, stride]: out, where the part of a page is to be read
  uint8_t* room = nullptr;                // for the copies, part behind part
};

// A sequence at this place, of so many pages.
struct NearSequence {
  int32_t place = 0;
  int32_t num_pages = 0;
  int32_t first = -1;  // place in the room of its first page's part; negative: it is read where it lies
};

// Copies the parts of the sequences that have a place in the room, and writes the table's rows of all of them; rows of
// others stay as they are. Bits are copied. Queued on the queue's GPU, or done on the calling thread; nothing is
// allocated. Bound by the link, or by reading and writing the parts once.
void bring_near(const NearPages& pages, std::span<const NearSequence> sequences, device::Queue& queue);

}  // namespace tessera::comm
