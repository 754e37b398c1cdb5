// SPDX-License-Identifier: Apache-2.0
#include "ops/embedding/embedding.h"

#include <fmt/format.h>

#include <algorithm>

#include "ops/reference_rows.h"

namespace tessera::ops {

std::string Embedding::Desc::to_string() const {
  return fmt::format("{} [{}, {}]", dtype_name(weight), vocab, hidden);
}

void embedding_reference(const Embedding::Desc& desc, const Embedding::Args& args, device::Queue& queue) {
  constexpr int64_t kBlock = 256;
  queue.parallel_for(args.num_tokens, 64, [&](int64_t begin, int64_t end) {
    float values[kBlock];
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t i = 0; i < desc.hidden; i += kBlock) {
        const int64_t count = std::min(kBlock, desc.hidden - i);
        load_floats(args.weight, std::max(args.ids[t], 0) * desc.hidden + i, count, values);
        for (int64_t s = 0; s < desc.streams; ++s) {
          store_floats(args.out, (t * desc.streams + s) * desc.hidden + i, count, values);
        }
      }
    }
  });
}

}  // namespace tessera::ops
