// SPDX-License-Identifier: Apache-2.0
#include "backends/cpu_common/index_scores.h"

#include <algorithm>
#include <cmath>

#include "backends/cpu_common/share.h"
#include "base/integer_math.h"
#include "numeric/bf16.h"

namespace tessera::backends::cpu_common {

using ops::EntryFormat;
using ops::IndexScores;

namespace {

constexpr int64_t kMaxHeads = 128;
constexpr int64_t kTokens = 16;  // of a job: bounds the stack

// Rows of one sequence.
void score_sequence(IndexKernel kernel, const IndexScores::Desc& desc, const IndexScores::Args& args, int64_t first_row,
                    int64_t num_rows, device::Queue& queue);

}  // namespace

bool index_scores_supports(const IndexScores::Desc& desc, std::string& why_not) {
  const EntryFormat format = desc.keys.format;
  if (desc.activation != DType::kBF16 || (format != EntryFormat::kIndexFp4 && format != EntryFormat::kBf16)) {
    why_not = "needs BF16 queries and keys in FP4 or BF16";
    return false;
  }
  if (desc.width > kIndexWidth || desc.width % kIndexStep != 0 || desc.heads > kMaxHeads) {
    why_not = "needs at most 128 heads of a multiple of 32, at most 256, not " + std::to_string(desc.width);
    return false;
  }
  return true;
}

void index_scores_run(IndexKernel kernel, const IndexScores::Desc& desc, const IndexScores::Args& args,
                      device::Queue& queue) {
  for (int64_t first = 0, end = 0; first < args.num_tokens; first = end) {
    const auto is_same = [&](int64_t row) { return args.keys.of_row(row) == args.keys.of_row(first); };
    for (end = first + 1; end < args.num_tokens && is_same(end);) ++end;
    score_sequence(kernel, desc, args, first, end - first, queue);
  }
}

namespace {

void score_sequence(IndexKernel kernel, const IndexScores::Desc& desc, const IndexScores::Args& args, int64_t first_row,
                    int64_t num_rows, device::Queue& queue) {
  const float scale =
      static_cast<float>(1 / std::sqrt(static_cast<double>(desc.width) * static_cast<double>(desc.heads)));
  const int64_t blocks = ceil_div<int64_t>(args.stride, kIndexKeys), entry_bytes = desc.keys.entry_bytes();
  // A block's keys are decoded once per piece.
  const int64_t tokens_each =
      blocks >= 2 * queue.num_threads()
          ? kTokens
          : std::min<int64_t>(kTokens, (num_rows + queue.num_threads() - 1) / queue.num_threads());
  if (blocks == 0) return;
  const int64_t groups = ceil_div(num_rows, tokens_each);
  const int64_t cost = num_rows * blocks * kIndexKeys * desc.heads * desc.width / 16;
  share(queue, blocks * groups, cost, [&](int64_t piece) {
    const int64_t first_key = piece / groups * kIndexKeys, done = piece % groups * tokens_each;
    const int64_t first = first_row + done;
    int64_t counts[kTokens], num_keys = 0;
    float weights[kTokens * kMaxHeads];
    IndexJob job{};
    job.num_tokens = std::min(tokens_each, num_rows - done);
    for (int64_t t = 0; t < job.num_tokens; ++t) {
      counts[t] = std::clamp<int64_t>(args.counts[first + t] - first_key, 0, kIndexKeys);
      num_keys = std::max(num_keys, counts[t]);
      const uint16_t* raw = args.weights.as<uint16_t>() + (first + t) * desc.heads;
      for (int64_t h = 0; h < desc.heads; ++h)
        weights[t * desc.heads + h] = numeric::bf16_round(numeric::bf16_to_float(raw[h]) * scale);
    }
    if (num_keys == 0) return;
    job.queries = args.queries.as<uint16_t>() + first * desc.heads * desc.width;
    job.weights = weights;
    const ops::SequenceEntries<const uint8_t> entries = args.keys.of_row(first_row);
    const uint8_t* keys[kIndexKeys];
    for (int64_t j = 0; j < num_keys; ++j) keys[j] = entries.at(first_key + j, entry_bytes);
    job.keys = keys;
    job.is_fp4 = desc.keys.format == EntryFormat::kIndexFp4;
    job.num_keys = num_keys;
    job.heads = desc.heads;
    job.width = desc.width;
    job.counts = counts;
    job.stride = args.stride;
    job.scores = args.scores + first * args.stride + first_key;
    kernel(job);
  });
}

}  // namespace

}  // namespace tessera::backends::cpu_common
