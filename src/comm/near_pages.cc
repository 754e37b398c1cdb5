// SPDX-License-Identifier: Apache-2.0
#include "comm/near_pages.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "comm/cuda/near_pages.h"

namespace tessera::comm {

void bring_near(const NearPages& pages, std::span<const NearSequence> sequences, device::Queue& queue) {
  TESSERA_CHECK(pages.offset % kNearBytes == 0 && pages.part_bytes % kNearBytes == 0, "parts of whole words");
  if (queue.stream() != nullptr) {
    while (!sequences.empty()) {
      NearCall call{.pages = pages};
      call.count = static_cast<int>(std::min<size_t>(sequences.size(), kNearSequences));
      std::copy_n(sequences.begin(), call.count, call.sequences);
      bring_near_on_gpu(call, queue.stream());
      sequences = sequences.subspan(static_cast<size_t>(call.count));
    }
    return;
  }
  for (const NearSequence& sequence : sequences) {
    for (int64_t n = 0; n < sequence.num_pages; ++n) {
      const int64_t at = sequence.place * pages.stride + n;
      const uint8_t* part = pages.pages[at] + pages.offset;
      uint8_t* near =
          sequence.first < 0 ? const_cast<uint8_t*>(part) : pages.room + (sequence.first + n) * pages.part_bytes;
      if (near != part) std::memcpy(near, part, static_cast<size_t>(pages.part_bytes));
      pages.table[at] = near;
    }
  }
}

}  // namespace tessera::comm
