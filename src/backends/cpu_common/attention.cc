// SPDX-License-Identifier: Apache-2.0
#include "backends/cpu_common/attention.h"

#include <algorithm>

#include "base/integer_math.h"

namespace tessera::backends::cpu_common {

using ops::Attention;
using ops::EntryFormat;

static_assert(kAttentionKeys == ops::kAttentionPart && kAttentionWidth == ops::kMaxHeadDim &&
              kAttentionChunk == ops::kKvGroup);

bool attention_supports(const Attention::Desc& desc, std::string& why_not) {
  if (desc.activation != DType::kBF16 ||
      (desc.layout.format != EntryFormat::kKvFp8Bf16 && desc.layout.format != EntryFormat::kBf16)) {
    why_not = "needs BF16 queries and keys in FP8 or BF16";
    return false;
  }
  if (desc.head_dim > kAttentionWidth || desc.head_dim % kAttentionChunk != 0 ||
      desc.layout.rope_dim % kAttentionChunk != 0) {
    why_not = "needs heads of a multiple of 64, at most 512, not " + std::to_string(desc.head_dim);
    return false;
  }
  return true;
}

void attention_run(AttentionKernel kernel, const Attention::Desc& desc, const Attention::Args& args,
                   device::Queue& queue) {
  // Each piece decodes the keys again, so heads are cut only as far as threads would be idle, by whole vectors.
  constexpr int64_t kVector = 16;
  const int64_t vectors = ceil_div<int64_t>(desc.heads, kVector),
                least = ceil_div<int64_t>(desc.heads, kAttentionHeads);
  const int64_t wanted = args.num_tokens >= 2 * queue.num_threads() ? 1 : queue.num_threads();
  const int64_t splits = std::max(least, std::min(wanted, vectors));
  queue.parallel_for(args.num_tokens * splits, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t t = item / splits, split = item % splits, position = args.positions[t];
      const int64_t head = vectors * split / splits * kVector;
      const int64_t head_end = std::min(desc.heads, vectors * (split + 1) / splits * kVector);
      const int64_t row = (t * desc.heads + head) * desc.head_dim;
      AttentionJob job{};
      job.q = args.q.as<uint16_t>() + row;
      job.sink = args.sink + head;
      job.out = args.out.as<uint16_t>() + row;
      job.num_heads = head_end - head;
      job.width = desc.head_dim;
      job.scale = desc.scale;
      job.nope = desc.layout.format == EntryFormat::kKvFp8Bf16 ? desc.layout.nope_dim() : 0;
      job.entry_bytes = desc.layout.entry_bytes();
      job.window_cache = args.window_cache.of_row(t);
      job.window_slots = args.window_slots;
      job.window_begin = std::max<int64_t>(0, position - desc.window + 1);
      job.window_count = position + 1 - job.window_begin;
      job.entry_cache = args.entry_cache.of_row(t);
      job.num_entries = args.entry_cache.exists() ? args.num_entries[t] : 0;
      job.selected = args.selected == nullptr ? nullptr : args.selected + t * args.selected_stride;
      kernel(job);
    }
  });
}

}  // namespace tessera::backends::cpu_common
