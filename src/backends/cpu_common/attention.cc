// SPDX-License-Identifier: Apache-2.0
#include "backends/cpu_common/attention.h"

#include <algorithm>

#include "backends/cpu_common/share.h"
#include "base/error.h"
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

namespace {

// Up to so many tokens are computed step by step (AttentionKernels), so many parts at a time, where there are more
// threads than whole vectors of heads keep busy without decoding keys too often.
constexpr int64_t kFewTokens = 8, kParts = 16, kManyThreads = 5;
constexpr int64_t kVector = kAttentionStep;  // heads that kernels take together

// Heads [head, head_end) of token t.
AttentionJob job_of(const Attention::Desc& desc, const Attention::Args& args, int64_t t, int64_t head,
                    int64_t head_end) {
  const int64_t row = (t * desc.heads + head) * desc.head_dim, position = args.positions[t];
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
  const ops::SequenceEntries<const uint8_t> entries = args.entry_cache.of_row(t);
  job.entries = entries.only;
  job.entry_pages = entries.pages;
  job.entry_offset = entries.offset;
  job.entry_shift = entries.shift;
  job.num_entries = args.entry_cache.exists() ? args.num_entries[t] : 0;
  job.selected = args.selected == nullptr ? nullptr : args.selected + t * args.selected_stride;
  return job;
}

// The workspace: sums of each token so far, twice, as some threads read those that others renew; and each part's state.
struct Scratch {
  AttentionSums tokens[kFewTokens][2];
  AttentionPartState parts[kParts];
};

int64_t layout_scratch(const Attention::Desc& desc, char* base, Scratch& s) {
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    char* at = base + used;
    used += round_up<int64_t>(bytes, 128);
    return at;
  };
  const auto floats = [&](int64_t count) { return reinterpret_cast<float*>(take(count * 4)); };
  for (AttentionSums(&sums)[2] : s.tokens) {
    sums[0] = {floats(desc.heads), floats(desc.heads), floats(desc.heads * desc.head_dim)};
    sums[1] = {floats(desc.heads), floats(desc.heads), sums[0].output};
  }
  for (AttentionPartState& part : s.parts) {
    part.decoded = take(kAttentionDecodedBytes);
    part.softmax = take(ceil_div(desc.heads, kAttentionHeads) * kAttentionSoftmaxBytes);
  }
  return used;
}

// Tokens one after another, cut into parts, of which a few are computed at a time, in three steps that all threads
// share (AttentionKernels): by keys, by heads, by values. What goes from thread to thread is logits, probabilities and
// values: each thread reads the keys it decodes, not all.
class FewTokens {
 public:
  FewTokens(const AttentionKernels& kernels, const Attention::Desc& desc, const Attention::Args& args,
            device::Queue& queue)
      : kernels_(kernels), desc_(desc), args_(args), queue_(queue) {
    TESSERA_CHECK(args.workspace != nullptr, "attention needs its workspace");
    layout_scratch(desc, static_cast<char*>(args.workspace), scratch_);
  }

  void run() {
    for (int64_t t = 0; t < args_.num_tokens; ++t) {
      const AttentionJob job = job_of(desc_, args_, t, 0, desc_.heads);
      const int64_t window_parts = ceil_div(job.window_count, kAttentionKeys);
      const int64_t all = window_parts + ceil_div(job.num_entries, kAttentionKeys);
      for (int64_t i = 0; i < all; ++i) {
        const bool is_window = i < window_parts;
        const int64_t first = (is_window ? i : i - window_parts) * kAttentionKeys;
        const int64_t left = (is_window ? job.window_count : job.num_entries) - first;
        scratch_.parts[num_parts_].keys = {is_window, first, std::min(left, kAttentionKeys)};
        tokens_[num_parts_++] = {t, i == 0, i + 1 == all};
        if (num_parts_ == kParts) flush();
      }
    }
    flush();
  }

 private:
  struct Part {
    int64_t t;
    bool is_first, is_last;  // of the token
  };

  AttentionJob job_of_token(int64_t t) const { return job_of(desc_, args_, t, 0, desc_.heads); }

  void flush() {
    if (num_parts_ == 0) return;
    constexpr int64_t kSteps = kAttentionKeys / kAttentionStep;
    const int64_t products = num_parts_ * kAttentionKeys * desc_.heads * desc_.head_dim;
    share(queue_, num_parts_ * kSteps, products / 16, [&](int64_t i) {
      const int64_t p = i / kSteps, begin = i % kSteps * kAttentionStep;
      const AttentionPartState& part = scratch_.parts[p];
      if (begin >= round_up(part.keys.count, 2 * kAttentionStep)) return;
      kernels_.logits(job_of_token(tokens_[p].t), part, begin);
    });
    const int64_t vectors = ceil_div(desc_.heads, kVector);
    share(queue_, num_parts_ * vectors, num_parts_ * kAttentionKeys * desc_.heads * 16, [&](int64_t i) {
      const int64_t p = i / vectors;
      kernels_.softmax(job_of_token(tokens_[p].t), scratch_.parts[p], i % vectors * kVector);
    });
    // Which parts are each token's.
    int64_t begins[kParts + 1], num_tokens = 0;
    for (int64_t p = 0; p < num_parts_; ++p) {
      if (p == 0 || tokens_[p].t != tokens_[p - 1].t) begins[num_tokens++] = p;
    }
    begins[num_tokens] = num_parts_;
    const int64_t columns = desc_.head_dim / kernels_.columns;
    const int64_t pieces = ceil_div(desc_.heads, kAttentionHeads) * columns;
    share(queue_, num_tokens * pieces, products / 16, [&](int64_t i) {
      const int64_t begin = begins[i / pieces], end = begins[i / pieces + 1], t = tokens_[begin].t;
      const AttentionSums* sums = scratch_.tokens[t];
      kernels_.output(job_of_token(t), scratch_.parts + begin, end - begin, i % pieces / columns * kAttentionHeads,
                      i % columns * kernels_.columns, tokens_[begin].is_first ? nullptr : &sums[num_flushes_ % 2],
                      tokens_[end - 1].is_last ? nullptr : &sums[(num_flushes_ + 1) % 2]);
    });
    num_parts_ = 0;
    ++num_flushes_;
  }

  const AttentionKernels& kernels_;
  const Attention::Desc& desc_;
  const Attention::Args& args_;
  device::Queue& queue_;
  Scratch scratch_{};
  Part tokens_[kParts];
  int64_t num_parts_ = 0, num_flushes_ = 0;
};

}  // namespace

int64_t attention_workspace(const Attention::Desc& desc, int64_t) {
  Scratch s{};
  return layout_scratch(desc, nullptr, s);
}

void attention_run(const AttentionKernels& kernels, const Attention::Desc& desc, const Attention::Args& args,
                   device::Queue& queue) {
  if (args.num_tokens == 0) return;
  const int64_t threads = queue.num_threads();
  if (args.num_tokens <= kFewTokens && args.num_tokens < threads && threads >= kManyThreads) {
    FewTokens(kernels, desc, args, queue).run();
    return;
  }
  // Each piece decodes the keys again, so heads are cut only as far as threads would be idle, by whole vectors.
  const int64_t vectors = ceil_div(desc.heads, kVector), least = ceil_div(desc.heads, kAttentionHeads);
  const int64_t wanted = std::min(threads, ceil_div(2 * threads, args.num_tokens));
  const int64_t splits = std::max(least, threads == 1 ? 1 : std::min(wanted, vectors));
  queue.parallel_for(args.num_tokens * splits, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t split = item % splits, head = vectors * split / splits * kVector;
      const int64_t head_end = std::min(desc.heads, vectors * (split + 1) / splits * kVector);
      kernels.whole(job_of(desc, args, item / splits, head, head_end));
    }
  });
}

}  // namespace tessera::backends::cpu_common
