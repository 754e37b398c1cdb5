// SPDX-License-Identifier: Apache-2.0
#pragma once
// The tiles of cuda_common/weight_stream.cuh, of the same classes Tiles and bit for bit the same, from one ring of
// packed weights (ring_weights.cuh) that all warps of a multiprocessor share: with a ring of its own a warp has few
// bytes on their way, and copies take instructions of the warps that decode.
//   block  16 consumer warps, and four more that fill the ring by bulk copies; one block to a multiprocessor
//   tile   16 rows by up to kTokens tokens: its units are chunks, and of each chunk the passes
//   range  a block's tiles are neighbours, and as many as any other's or one more; unit j of them is warp j % 16's
//   place  stages that are filled behind each other, over all rounds of the ring: a unit has one, or of FP8 two
//   round  as many tiles as there is room for chunk sums; they are added in ascending order when all are there
#include <cstdint>
#include <type_traits>

#include "backends/cuda_common/fast_division.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/ptx/bulk_copy.cuh"
#include "backends/cuda_common/weight_stream.cuh"
#include "backends/sm90/ring_weights.cuh"
#include "backends/sm90/sum_plans.h"

namespace tessera::backends::sm90 {

// In shared memory.
template <int kTileTokens, class ItsWeights = RingNvfp4>
struct UnitRing : RingPlan<kTileTokens, ItsWeights::kFormat> {
  using Weights = ItsWeights;
  static constexpr int kTokens = kTileTokens, kSums = cuda_common::kTileRows * kTokens;  // of a unit
  typename Weights::Stage stages[UnitRing::kStages];
  float sums[2][UnitRing::kRoundUnits][kSums];  // written by turns, so that a round needs one barrier
  cuda_common::ptx::SharedBarrier full[UnitRing::kStages], free[UnitRing::kStages], summed;

  // By all threads; the block's next barrier is the caller's. A thread of each warp: those of one would take turns. In
  // a loop as short as it is: nobody has run these instructions lately, and they are fetched in turn.
  __device__ void init() {
    const int warp = static_cast<int>(threadIdx.x) / cuda_common::kWarp;
    if (threadIdx.x % cuda_common::kWarp != 0) return;
#pragma unroll 1
    for (int i = warp; i < UnitRing::kStages; i += UnitRing::kWarps + UnitRing::kCopyingWarps) {
      full[i].init(1), free[i].init(cuda_common::kWarp);
    }
    if (warp == 0) summed.init(UnitRing::kWarps * cuda_common::kWarp);
  }
};

struct RingShape {
  RingColumns columns;
  int round_tiles;
  cuda_common::FastDivisor tile_units;

  RingShape(int64_t width, int passes, int round_units)
      : columns(width),
        round_tiles(round_units / (columns.num_chunks * passes)),
        tile_units(static_cast<uint32_t>(columns.num_chunks * passes)) {}
};

__device__ inline bool is_copying_warp() {
  return threadIdx.x >= RingPlan<1>::kWarps * cuda_common::kWarp;
}

// What lies in a place: a stage of a unit.
struct RingPart {
  int unit, part;
};

// This block's tiles [first, first + count), each of whose units takes so many places.
template <int kUnitStages = 1>
struct RingRange {
  int first, count;
  static constexpr bool kHasGuests = false;  // guests: units whose weights are not the ring's

  __device__ explicit RingRange(int num_tiles, int block = static_cast<int>(blockIdx.x)) {
    const int blocks = static_cast<int>(gridDim.x);
    const int each = num_tiles / blocks, others = num_tiles - each * blocks;
    first = each * block + min(block, others), count = each + (block < others ? 1 : 0);
  }
  __device__ int tile(int local) const { return first + local; }
  __device__ int place(int unit) const { return unit * kUnitStages; }
  __device__ RingPart part_at(int place) const { return {place / kUnitStages, place % kUnitStages}; }
};

// Of a Range: RingRange, or what else has `count` tiles of all, each with a number.
template <class Range>
__device__ int units_of(const RingShape& shape, const Range& range) {
  return range.count * static_cast<int>(shape.tile_units.divisor());
}

// A unit of the range: its tile, and which of the tile's it is.
struct RingUnit {
  int tile, part;

  template <class Range>
  __device__ RingUnit(const RingShape& shape, const Range& range, int unit) {
    const int local = static_cast<int>(shape.tile_units.quotient(static_cast<uint32_t>(unit)));
    tile = range.tile(local), part = unit - local * static_cast<int>(shape.tile_units.divisor());
  }
};

// What a place's stage is copied from; of no bytes where its unit has nothing for it.
struct RingCopy {
  const char* from;
  int bytes;
};
template <class Ring, class Tiles, class Range>
__device__ RingCopy copy_of(const RingShape& shape, const Range& range, const Tiles& tiles, int place) {
  const RingPart part = range.part_at(place);
  const RingUnit at(shape, range, part.unit);
  const auto weights = tiles.weights(tiles.place(at.tile), at.part % Tiles::kPasses);
  const int chunk = at.part / Tiles::kPasses;
  const auto copy = [&]<class Weights>(std::type_identity<Weights>) {
    return RingCopy{Weights::stage_from(weights, shape.columns, chunk, part.part),
                    Weights::stage_bytes(shape.columns.blocks_of(chunk), part.part)};
  };
  if constexpr (Range::kHasGuests) {
    if (range.is_guest(part.unit)) return copy(std::type_identity<typename Range::Guests>());
  }
  return copy(std::type_identity<typename Ring::Weights>());
}

// What lies in places [begin, end) of the range, by the copying warps, a lane of each: place j by warp j mod
// kCopyingWarps. Lanes of one warp would wait for different barriers, which racecheck does not follow, or each for all,
// which costs a fifth of the ring's speed; and one lane does not issue copies fast enough.
template <class Ring, class Tiles, class Range>
__device__ void copy_units(const RingShape& shape, const Range& range, const Tiles& tiles, Ring& s, int begin,
                           int end) {
  constexpr int kCopiers = Ring::kCopyingWarps;
  // So many places of the ring's second round come into the L2 cache while their stages are in use: of a range that is
  // little longer than the ring these would else be on their way last, when other blocks have ended.
  constexpr int kFetched = 20;
  // A stage's places are one lane's. What a warp waits for lies in the place of a lane that has copied, from 16 or, of
  // two stages to a unit, 32 places before, for the same warp: so it has copied, too, what was in that stage a round
  // before, and what was there two rounds before, which a barrier could not tell from it, has been used. Where units of
  // one stage follow such of two a warp's first one has another lane's copies before it: it has to lie in one of the
  // first two rounds (uses_ring() in sum_plans.h).
  static_assert(Ring::kStages % kCopiers == 0 && Ring::kWarps % kCopiers == 0);
  static_assert(Ring::kStages >= Ring::kWarps * (Range::kHasGuests ? 2 : Ring::Weights::kStages));
  if (threadIdx.x % cuda_common::kWarp != 0) return;
  const int copier = static_cast<int>(threadIdx.x) / cuda_common::kWarp - Ring::kWarps;
  for (int place = begin + (copier + kCopiers - begin % kCopiers) % kCopiers; place < end; place += kCopiers) {
    const int stage = place % Ring::kStages;
    if (place / Ring::kStages == 1 && stage < kCopiers) {
#pragma unroll 1
      for (int later = place; later < min(end, Ring::kStages + kFetched); later += kCopiers) {
        const RingCopy copy = copy_of<Ring>(shape, range, tiles, later);
        if (copy.bytes > 0) cuda_common::ptx::prefetch_bulk(copy.from, copy.bytes);
      }
    }
    const RingCopy copy = copy_of<Ring>(shape, range, tiles, place);
    s.free[stage].wait(place / Ring::kStages % 2 ^ 1);
    if (copy.bytes == 0) {
      s.full[stage].arrive();
      continue;
    }
    s.full[stage].arrive_and_expect(copy.bytes);
    cuda_common::ptx::copy_bulk_once(&s.stages[stage], copy.from, copy.bytes, s.full[stage]);
  }
}

// By the copying warps behind copy_units() of places [0, end): waits until what each of them copied last is there.
template <class Ring>
__device__ void wait_for_last_copy(Ring& s, int end) {
  const int copier = static_cast<int>(threadIdx.x) / cuda_common::kWarp - Ring::kWarps;
  const int last = (end - 1 - copier) / Ring::kCopyingWarps * Ring::kCopyingWarps + copier;
  if (copier < end) s.full[last % Ring::kStages].wait(last / Ring::kStages % 2);
}

// The sums of a unit of so many blocks of 128 columns, from its first place on. x: this lane's token, from its own
// first column of the unit on; scales: FP8's.
template <class Weights, class Ring>
__device__ void sum_unit(Ring& s, int place, int num_blocks, const uint4* x, uint4 scales,
                         float (&s_sums)[Ring::kSums]) {
  using Share = typename Weights::Share;
  constexpr int kAtOnce = 2;  // blocks
  constexpr int kBlockWords = cuda_common::kShareBlock / 8, kWords = cuda_common::kShareColumns / 8;
  static_assert(Weights::kBlocks % kAtOnce == 0);
  // A unit's stages are neighbours, of one round.
  static_assert(Ring::kStages % Weights::kStages == 0);
  const int lane = static_cast<int>(threadIdx.x) % cuda_common::kWarp;
  const int first_stage = place % Ring::kStages;
  uint4 inputs[kAtOnce][kWords];
  const auto load_inputs = [&](int first, int n) {
    // Columns that aren't there have no inputs, and no weights that count: the last block's again.
    const int block = min(first + n, num_blocks - 1);
#pragma unroll
    for (int i = 0; i < kWords; ++i) inputs[n][i] = cuda_common::ptx::load_here(x + block * kBlockWords + i);
  };
#pragma unroll
  for (int n = 0; n < kAtOnce; ++n) load_inputs(0, n);
  cuda_common::Chains chains = {};
  uint32_t carries[2] = {};
  // Not unrolled: registers would not do for all blocks at once.
#pragma unroll 1
  for (int first = 0; first < kChunkBlocks; first += kAtOnce) {
    const bool begins = first % Weights::kBlocks == 0, ends = (first + kAtOnce) % Weights::kBlocks == 0;
    const int stage = first_stage + first / Weights::kBlocks;
    const auto& weights = reinterpret_cast<const typename Weights::Stage&>(s.stages[stage]);
    if (begins) {
      // What was in this stage before is another warp's, perhaps still on its way: a barrier tells only two rounds
      // apart.
      const int parity = place / Ring::kStages % 2;
      s.free[stage].wait(parity ^ 1);
      s.full[stage].wait(parity);
      if constexpr (Weights::kIsNvfp4) scales = weights.all_scales_of(0, lane);  // of the next blocks first
    }
    Share shares[kAtOnce];
    const auto load_share = [&](int n) { shares[n] = Weights::share(weights, (first + n) % Weights::kBlocks, lane); };
    // FP8's have twice as many bytes: registers do not do for two.
    constexpr bool kOneByOne = !Weights::kIsNvfp4;
#pragma unroll
    for (int n = 0; n < kAtOnce && !kOneByOne; ++n) load_share(n);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if constexpr (kOneByOne) load_share(n);
      if (first + n >= num_blocks) continue;
      Weights::prepare(shares[n], n == 0 ? scales.x : scales.y);
      if constexpr (Share::kFindsNan) carries[0] |= shares[n].carries[0], carries[1] |= shares[n].carries[1];
      cuda_common::add_block(shares[n], inputs[n], chains);
      if (first + kAtOnce < kChunkBlocks) load_inputs(first + kAtOnce, n);
    }
    // By every lane, for its own loads: one that arrives for its warp behind __syncwarp() racecheck does not follow.
    if (ends) s.free[stage].arrive_behind(cuda_common::word_of(chains));
    scales = {scales.z, scales.w, 0, 0};
  }
  float sums[1][4];
  cuda_common::add_chains(chains, sums[0]);
  if constexpr (Share::kFindsNan) cuda_common::add_nans<Share>(carries, sums);
  if constexpr (Ring::kTokens == 1) {
    if (lane % 4 == 0) s_sums[lane / 4] = sums[0][0], s_sums[lane / 4 + 8] = sums[0][2];
  } else {
    reinterpret_cast<float4*>(s_sums)[lane] = {sums[0][0], sums[0][1], sums[0][2], sums[0][3]};
  }
}

// What stream_tiles() calls a sum of a tile; of one token rows follow each other.
template <int kTokens>
__device__ int streamed_at(int i) {
  static_assert(kTokens == 1 || kTokens == cuda_common::kTileTokens);
  return kTokens == 1 ? i % 8 * 16 + i / 8 * 2 : i;
}

// Tiles [begin_tile, end_tile) of this block, by its consumer warps; kAreWhole: all chunks. A block's calls follow each
// other without a gap, and `turn`, 0 at first, is theirs to keep. before_results() comes before a round's results.
template <bool kAreWhole, class Ring, class Tiles, class Range, class BeforeResults>
__device__ void ring_tiles(const RingShape& shape, const Range& range, const Tiles& tiles, int begin_tile, int end_tile,
                           int& turn, Ring& s, const BeforeResults& before_results) {
  constexpr int kPasses = Tiles::kPasses, kTokens = Ring::kTokens;
  const int warp = static_cast<int>(threadIdx.x) / cuda_common::kWarp;
  const int lane = static_cast<int>(threadIdx.x) % cuda_common::kWarp;
  const int tile_units = static_cast<int>(shape.tile_units.divisor());
  // Results begin with the last warp's: the first ones may have a unit more.
  const int own = (Ring::kWarps - 1 - warp) * cuda_common::kWarp + lane;
  const int first_unit = begin_tile * tile_units;
  int unit = first_unit + (Ring::kWarps + warp - first_unit % Ring::kWarps) % Ring::kWarps;
  for (int first = begin_tile; first < end_tile; first += shape.round_tiles, turn ^= 1) {
    const int num_tiles = min(shape.round_tiles, end_tile - first), num_sums = num_tiles * Ring::kSums;
    const int begin = first * tile_units, end = begin + num_tiles * tile_units;
    const auto place_of = [&](int i) { return tiles.place(range.tile(first + i / Ring::kSums)); };
    // Of this thread's first result, on their way while sums are worked out.
    typename Tiles::Place place;
    typename Tiles::Ticket ticket;
    if (own < num_sums) place = place_of(own), ticket = tiles.ticket(place, streamed_at<kTokens>(own % Ring::kSums));
    for (; unit < end; unit += Ring::kWarps) {
      const RingUnit at(shape, range, unit);
      const auto at_place = tiles.place(at.tile);
      const int chunk = at.part / kPasses;
      const uint4* x = reinterpret_cast<const uint4*>(tiles.inputs(at_place)) + chunk * (cuda_common::kChunk / 8) +
                       lane % 4 * (cuda_common::kShareColumns / 8);
      const auto sum = [&]<class Weights>(std::type_identity<Weights>) {
        uint4 scales = {};
        if constexpr (!Weights::kIsNvfp4) {
          scales = Weights::chunk_scales(tiles.weights(at_place, at.part % kPasses), shape.columns, chunk);
        }
        const int num_blocks = kAreWhole ? kChunkBlocks : shape.columns.blocks_of(chunk);
        sum_unit<Weights>(s, range.place(unit), num_blocks, x, scales, s.sums[turn][unit - begin]);
      };
      if constexpr (Range::kHasGuests) {
        if (range.is_guest(unit)) {
          sum(std::type_identity<typename Range::Guests>());
          continue;
        }
      }
      sum(std::type_identity<typename Ring::Weights>());
    }
    s.summed.arrive();
    s.summed.wait(turn);
    before_results();
    const auto finish = [&](int i, const typename Tiles::Place& its_place, const typename Tiles::Ticket& its_ticket) {
      const float* s_sums = s.sums[turn][i / Ring::kSums * tile_units] + i % Ring::kSums;
      cuda_common::finish_sum<Ring::kSums>(shape.columns.num_chunks, tiles, its_place,
                                           streamed_at<kTokens>(i % Ring::kSums), s_sums, its_ticket);
    };
    if (own < num_sums) finish(own, place, ticket);
    for (int i = own + Ring::kWarps * cuda_common::kWarp; i < num_sums; i += Ring::kWarps * cuda_common::kWarp) {
      const auto other = place_of(i);
      finish(i, other, tiles.ticket(other, streamed_at<kTokens>(i % Ring::kSums)));
    }
  }
}

// All of the range.
template <bool kAreWhole, class Ring, class Tiles, class Range>
__device__ void ring_tiles(const RingShape& shape, const Range& range, const Tiles& tiles, Ring& s) {
  int turn = 0;
  ring_tiles<kAreWhole>(shape, range, tiles, 0, range.count, turn, s, [] {});
}

}  // namespace tessera::backends::sm90
