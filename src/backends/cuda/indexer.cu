// SPDX-License-Identifier: Apache-2.0
// index_scores: half a warp per key of a token.
#include <cmath>

#include "backends/cuda/kernels.h"
#include "backends/cuda_common/entries.cuh"
#include "backends/cuda_common/lanes.cuh"
#include "backends/cuda_common/launch.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kKeysPerBlock = 8;
constexpr int64_t kMaxWidth = 512;

struct ScoreJob {
  Values queries, weights;
  ops::PagedEntries<const uint8_t> keys;
  const int32_t* counts;
  float* scores;
  Entries entries;
  int64_t heads, width, stride;
  float scale;
  bool is_bf16;
};

// Grid: tokens by groups of keys.
template <ops::EntryFormat kFormat>
__global__ void __launch_bounds__(kKeysPerBlock* kLanes) score_keys(ScoreJob job) {
  wait_for_previous();
  __shared__ float s_keys[kKeysPerBlock][kMaxWidth + kLanes];  // the padding keeps both halves of a warp on other banks
  const int64_t t = blockIdx.x, count = job.counts[t];
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kKeysPerBlock;
  if (first >= count) return;
  const int part = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int64_t key = min(first + part, count - 1);
  const uint8_t* entry = job.keys.of_row(t).at(key, job.entries.bytes);
  // A lane writes and reads its own values only.
  for (int64_t c = lane; c < job.width; c += kLanes) {
    s_keys[part][c] = job.entries.value<kFormat>(entry, static_cast<int>(c));
  }
  float score = 0;
  for (int64_t h = 0; h < job.heads; ++h) {
    const int64_t query = (t * job.heads + h) * job.width;
    float sum = 0;
#pragma unroll 8
    for (int64_t c = lane; c < job.width; c += kLanes) sum += job.queries[query + c] * s_keys[part][c];
    const float product = add_lanes(sum);
    const float weight = round_to(job.is_bf16, job.weights[t * job.heads + h] * job.scale);
    score += weight * (product < 0 ? 0.0f : product);  // a NaN passes through
  }
  if (lane == 0 && first + part < count) job.scores[t * job.stride + key] = score;
}

}  // namespace

void index_scores(const ops::IndexScores::Desc& desc, const ops::IndexScores::Args& args, device::Queue& queue) {
  const float scale =
      static_cast<float>(1 / std::sqrt(static_cast<double>(desc.width) * static_cast<double>(desc.heads)));
  const ScoreJob job{values_of(args.queries),
                     values_of(args.weights),
                     args.keys,
                     args.counts,
                     args.scores,
                     entries_of(desc.keys),
                     desc.heads,
                     desc.width,
                     args.stride,
                     scale,
                     desc.activation == DType::kBF16};
  const dim3 grid(static_cast<unsigned>(args.num_tokens),
                  static_cast<unsigned>(ceil_div<int64_t>(args.stride, kKeysPerBlock)));
  with_entries(desc.keys.format, [&](auto format) {
    launch("index_scores", queue, score_keys<format.value>, grid, kKeysPerBlock * kLanes, 0, job);
  });
}

}  // namespace tessera::backends::cuda
