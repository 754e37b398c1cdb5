// SPDX-License-Identifier: Apache-2.0
#include "ops/stream_add/stream_add.h"

#include <fmt/format.h>

#include <algorithm>

#include "ops/reference_rows.h"

namespace tessera::ops {

std::string StreamAdd::Desc::to_string() const {
  return fmt::format("{} x {}", streams, hidden);
}

void stream_add_reference(const StreamAdd::Desc& desc, const StreamAdd::Args& args, device::Queue& queue) {
  constexpr int64_t kBlock = 256;
  queue.parallel_for(args.num_tokens * desc.streams, 16, [&](int64_t begin, int64_t end) {
    float z[kBlock], e[kBlock];
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t i = 0; i < desc.hidden; i += kBlock) {
        const int64_t count = std::min(kBlock, desc.hidden - i);
        load_floats(args.z, row * desc.hidden + i, count, z);
        load_floats(args.e, row / desc.streams * desc.hidden + i, count, e);
        for (int64_t n = 0; n < count; ++n) z[n] += e[n];
        store_floats(args.out, row * desc.hidden + i, count, z);
      }
    }
  });
}

}  // namespace tessera::ops
