// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/reference_rows.h"

namespace tessera::ops {

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

// Running result of one head: softmax maximum, denominator and unnormalised output.
struct Partial {
  float max = kNone;
  float sum = 0;
  float output[kMaxHeadDim] = {};
};

// Folds `part` into `total`. Both may be empty (max -inf, sum 0).
void merge(Partial& total, const Partial& part, int64_t width) {
  const float max = std::isnan(part.max) || part.max > total.max ? part.max : total.max;
  if (max == kNone) return;  // exp(-inf - -inf) would be NaN
  const float keep = std::exp(total.max - max), add = std::exp(part.max - max);
  total.max = max;
  total.sum = total.sum * keep + part.sum * add;
  for (int64_t c = 0; c < width; ++c) total.output[c] = total.output[c] * keep + part.output[c] * add;
}

// Softmax over one part's keys [count, width], which are values too.
void attend_part(const Attention::Desc& desc, const float* q, const float* keys, int64_t count, Partial& part) {
  const int64_t width = desc.head_dim;
  float logits[kAttentionPart];
  part.max = kNone;
  for (int64_t n = 0; n < count; ++n) {
    logits[n] = dot(q, keys + n * width, width) * desc.scale;
    part.max = std::isnan(logits[n]) || logits[n] > part.max ? logits[n] : part.max;
  }
  part.sum = 0;
  std::fill_n(part.output, width, 0.0f);
  for (int64_t n = 0; n < count; ++n) {
    const float p = std::exp(logits[n] - part.max);
    part.sum += p;
    const float rounded = round_to(desc.activation, p);
    for (int64_t c = 0; c < width; ++c) part.output[c] += rounded * keys[n * width + c];
  }
}

// The key list of one token: window positions, then entries.
struct KeyList {
  const Attention::Desc& desc;
  const Attention::Args& args;
  int64_t token;
  int64_t window_begin, window_count, num_entries;

  KeyList(const Attention::Desc& d, const Attention::Args& a, int64_t t) : desc(d), args(a), token(t) {
    const int64_t position = a.positions[t];
    window_begin = std::max<int64_t>(0, position - d.window + 1);
    window_count = position + 1 - window_begin;
    num_entries = !a.entry_cache.exists() ? 0 : a.num_entries[t];
  }
  const uint8_t* window_key(int64_t rank) const {
    return args.window_cache.of_row(token) + (window_begin + rank) % args.window_slots * desc.layout.entry_bytes();
  }
  const uint8_t* entry_key(int64_t rank) const {
    const int64_t index = args.selected == nullptr ? rank : args.selected[token * args.selected_stride + rank];
    return args.entry_cache.of_row(token).at(index, desc.layout.entry_bytes());
  }
};

// All heads [head_begin, head_end) of one token; each key is decoded once.
void attend_token(const Attention::Desc& desc, const Attention::Args& args, int64_t token, int64_t head_begin,
                  int64_t head_end) {
  constexpr int64_t kHeadBlock = 16;  // bounds the stack
  const int64_t width = desc.head_dim;
  const KeyList list(desc, args, token);
  float keys[kAttentionPart * kMaxHeadDim], q[kMaxHeadDim];
  Partial totals[kHeadBlock], part;
  for (int64_t block = head_begin; block < head_end; block += kHeadBlock) {
    const int64_t block_end = std::min(block + kHeadBlock, head_end);
    std::fill_n(totals, kHeadBlock, Partial{});
    const auto visit_parts = [&](int64_t num_keys, const auto& key_at) {
      for (int64_t first = 0; first < num_keys; first += kAttentionPart) {
        const int64_t count = std::min(kAttentionPart, num_keys - first);
        for (int64_t n = 0; n < count; ++n) decode_entry(desc.layout, key_at(first + n), keys + n * width);
        for (int64_t h = block; h < block_end; ++h) {
          load_floats(args.q, (token * desc.heads + h) * width, width, q);
          attend_part(desc, q, keys, count, part);
          merge(totals[h - block], part, width);
        }
      }
    };
    visit_parts(list.window_count, [&](int64_t rank) { return list.window_key(rank); });
    visit_parts(list.num_entries, [&](int64_t rank) { return list.entry_key(rank); });
    for (int64_t h = block; h < block_end; ++h) {
      Partial& total = totals[h - block];
      // The sink: one more term of the denominator, without a value.
      std::fill_n(part.output, width, 0.0f);
      part.max = args.sink[h], part.sum = 1;
      merge(total, part, width);
      for (int64_t c = 0; c < width; ++c) total.output[c] /= total.sum;
      store_floats(args.out, (token * desc.heads + h) * width, width, total.output);
    }
  }
}

}  // namespace

std::string Attention::Desc::to_string() const {
  return fmt::format("{} heads of {}, window {}, keys {}", heads, head_dim, window, ops::to_string(layout.format));
}

bool attention_reference_supports(const Attention::Desc& desc, std::string& why_not) {
  if (desc.head_dim > kMaxHeadDim) {
    why_not = fmt::format("heads of at most {}, not {}", kMaxHeadDim, desc.head_dim);
    return false;
  }
  return true;
}

void attention_reference(const Attention::Desc& desc, const Attention::Args& args, device::Queue& queue) {
  // Few tokens: heads are spread too. How work is cut changes no result.
  const int64_t splits =
      std::min<int64_t>(desc.heads, args.num_tokens >= 2 * queue.num_threads() ? 1 : queue.num_threads());
  queue.parallel_for(args.num_tokens * splits, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t split = item % splits;
      attend_token(desc, args, item / splits, desc.heads * split / splits, desc.heads * (split + 1) / splits);
    }
  });
}

}  // namespace tessera::ops
