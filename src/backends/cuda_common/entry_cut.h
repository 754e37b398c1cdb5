// SPDX-License-Identifier: Apache-2.0
#pragma once
// How an expert's slots, or a group's rows, are cut into entries of work: as few as there can be, and alike but for
// whole steps of what a tile's products take at once. A tile's time follows its steps: 208 slots in tiles of 128 with
// steps of 32 are 96 and 112, so 3 and 4 steps, where two of 104 would be 4 and 4.
#include <cstdint>

#include "base/host_device.h"

namespace tessera::backends::cuda_common {

struct EntryCut {
  int32_t count, parts, step;

  // Of at most `most` each, which is a multiple of `step`.
  TESSERA_HOST_DEVICE EntryCut(int32_t count, int32_t most, int32_t step)
      : count(count), parts((count + most - 1) / most), step(step) {}
  // Where number `part` begins; parts: the end.
  TESSERA_HOST_DEVICE int32_t begin(int32_t part) const {
    const int32_t steps = (count + step - 1) / step;
    const auto at = static_cast<int32_t>(int64_t{steps} * part / parts) * step;
    return at < count ? at : count;
  }
  TESSERA_HOST_DEVICE int32_t size(int32_t part) const { return begin(part + 1) - begin(part); }
};

}  // namespace tessera::backends::cuda_common
