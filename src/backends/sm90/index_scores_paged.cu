// SPDX-License-Identifier: Apache-2.0
// index_scores of few tokens whose keys lie in pages of whole tiles: a thread block has one token, and each of its
// warpgroups takes tile after tile of 64 keys, which one of its threads has copied some tiles ahead, each by one bulk
// copy: a tile lies in a row within a page. The next tile is decoded while products of the one before run.
// What bounds it is open: decoding, products, weighing and copies hide one another only in part
// (docs/performance/hopper.md, "Index keys by bulk copies").
#include "backends/cuda_common/ptx/bulk_copy.cuh"
#include "backends/cuda_common/ring_place.cuh"
#include "backends/sm90/index_products.cuh"
#include "backends/sm90/uniform.cuh"

namespace tessera::backends::sm90::index {

namespace {

constexpr int kWarp = 32, kStages = 3, kTileBytes = kKeys * kEntryBytes;
static_assert(kTileBytes % 16 == 0);

struct alignas(16) KeyRing {
  char tiles[kStages][kTileBytes];
  ptx::SharedBarrier full[kStages], free[kStages];
};

struct Shared {
  char queries[kQueryBytes];
  KeyRing rings[kFewWarpgroups];
  float weights[kHeads];
};

// A warpgroup's walk over every step-th tile of a token's keys, `first` the first of its keys.
class PageWalk {
 public:
  // Makes the barriers, by the thread that will copy.
  __device__ PageWalk(KeyRing& ring, int first, int step) : ring_(ring), first_(first), step_(step) {
    if (thread() != 0) return;
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) ring_.full[stage].init(1), ring_.free[stage].init(kWarpgroup);
  }

  // Begins to copy the first tiles.
  __device__ void begin(const Job& job, int token, int count) {
    keys_ = job.keys.of_row(token);
    count_ = count;
    for (int stage = 0; stage < kStages; ++stage) copy_next();
  }

  __device__ void run(const Job& job, int token, const Shared& s) {
    Operand a[2];
    if (first_ < count_) take_next(a[0]);
    while (first_ < count_) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sums[kHeads / 2];
        multiply(a[i], s.queries, sums);
        if (first_ + step_ < count_) take_next(a[1 - i]);
        ptx::wait_for_products<0>();
        finish(job, token, first_ + key_of(lane_of_row()), count_, s.weights, sums);
        first_ += step_;
        if (first_ >= count_) break;
      }
    }
  }

 private:
  __device__ static int thread() {
    return static_cast<int>(threadIdx.x) % kWarpgroup;
  }

  // Which of a tile's keys is this lane's row g (0) or g + 8 (1): a warp's are so far apart that its lanes, which read
  // the same words of eight of them at once, meet in no bank (17 words to a key).
  __device__ static int key_of(int r) {
    const int g = thread() % kWarp / 4;
    return g % 4 * 8 + g / 4 + thread() / kWarp * 2 + 32 * r;
  }

  // The next tile, decoded; then its stage is filled again.
  __device__ void take_next(Operand& a) {
    ring_.full[from_.stage].wait(from_.parity);
    const Codes codes = load(ring_.tiles[from_.stage]);
    ring_.free[from_.stage].arrive_behind(word_of(codes));
    from_.advance();
    decode(codes, a);
    copy_next();
    __syncwarp();  // products are a whole warp's
  }

  // By the first warp. A tile that the token sees in part is there as a whole: pages are.
  __device__ void copy_next() {
    if (thread() >= kWarp) return;
    const int tile = num_copied_++, first = first_of_all_ + tile * step_;
    if (first >= count_) return;
    // Each lane finds one of the next 32: an address that is found for each copy is waited for each time.
    const int own = first + thread() * step_;
    if (tile % kWarp == 0) tile_ = own < count_ ? keys_.at(own, kEntryBytes) : nullptr;
    const uint64_t address = __shfl_sync(~0u, reinterpret_cast<uint64_t>(tile_), tile % kWarp);
    if (thread() == 0) {
      ptx::SharedBarrier& full = ring_.full[to_.stage];
      ring_.free[to_.stage].wait(to_.parity ^ 1);
      full.arrive_and_expect(kTileBytes);
      ptx::copy_bulk(ring_.tiles[to_.stage], reinterpret_cast<const void*>(address), kTileBytes, full);
    }
    to_.advance();
  }
  __device__ static uint32_t word_of(const Codes& codes) {
    uint32_t word = codes.scales[0] | codes.scales[1];
#pragma unroll
    for (int i = 0; i < 4 * kGroups; ++i) word |= codes.words[i / (2 * kGroups)][i / 2 % kGroups][i % 2];
    return word;
  }
  __device__ static Codes load(const char* tile) {
    Codes codes;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t* row = reinterpret_cast<const uint32_t*>(tile + key_of(r) * kEntryBytes);
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) codes.words[r][n][i] = row[n * kGroup / 8 + 2 * lane_of_row() + i];
      }
      codes.scales[r] = row[kCodeBytes / 4];
    }
    return codes;
  }

  KeyRing& ring_;
  int first_;
  const int step_, first_of_all_ = first_;
  int count_ = 0, num_copied_ = 0;
  ops::SequenceEntries<const uint8_t> keys_;
  const uint8_t* tile_ = nullptr;  // a lane's of the 32 that are copied
  cuda_common::RingPlace<kStages> from_, to_;
};

// Grid: tokens by groups of tiles; a block takes every gridDim.y-th.
__global__ void __launch_bounds__(kFewWarpgroups* kWarpgroup, 1) score_paged_keys(const __grid_constant__ Job job) {
  Shared& s = *cuda_common::swizzled_shared<Shared>();
  const int thread = static_cast<int>(threadIdx.x), token = static_cast<int>(blockIdx.x);
  const int warpgroup = uniform(thread / kWarpgroup);
  PageWalk walk(s.rings[warpgroup], (static_cast<int>(blockIdx.y) * kFewWarpgroups + warpgroup) * kKeys,
                static_cast<int>(gridDim.y) * kFewWarpgroups * kKeys);
  const int count = uniform(job.counts[token]);
  cuda_common::wait_for_previous();
  if (static_cast<int>(blockIdx.y) * kFewWarpgroups * kKeys >= count) return;
  walk.begin(job, token, count);
  if (thread < QueryPiece::kOfToken) {
    QueryPiece(job.queries + static_cast<int64_t>(token) * kHeads * kWidth, thread).store(s.queries);
  }
  load_weights(job, token, 1, s.weights);
  ptx::show_to_products();
  __syncthreads();
  walk.run(job, token, s);
}

}  // namespace

void score_paged(const Job& job, dim3 grid, const device::Queue& queue) {
  cuda_common::launch("index_scores", queue, score_paged_keys, grid, kFewWarpgroups * kWarpgroup, sizeof(Shared), job);
}

}  // namespace tessera::backends::sm90::index
