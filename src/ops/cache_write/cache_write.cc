// SPDX-License-Identifier: Apache-2.0
#include "ops/cache_write/cache_write.h"

#include <fmt/format.h>

#include "ops/reference_rows.h"

namespace tessera::ops {

namespace {

constexpr int64_t kMaxWidth = 4096;

}  // namespace

std::string CacheWrite::Desc::to_string() const {
  return layout.to_string();
}

bool cache_write_reference_supports(const CacheWrite::Desc& desc, std::string& why_not) {
  if (desc.layout.width <= kMaxWidth) return true;
  why_not = fmt::format("entries of at most {} values, not {}", kMaxWidth, desc.layout.width);
  return false;
}

void cache_write_reference(const CacheWrite::Desc& desc, const CacheWrite::Args& args, device::Queue& queue) {
  const int64_t width = desc.layout.width, entry_bytes = desc.layout.entry_bytes();
  queue.parallel_for(args.num_rows, 64, [&](int64_t begin, int64_t end) {
    float row[kMaxWidth];
    for (int64_t i = begin; i < end; ++i) {
      if (args.slots[i] < 0) continue;
      load_floats(args.rows, i * width, width, row);
      encode_entry(desc.layout, row, args.cache.of_row(i).at(args.slots[i], entry_bytes));
    }
  });
}

}  // namespace tessera::ops
