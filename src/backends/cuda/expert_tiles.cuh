// SPDX-License-Identifier: Apache-2.0
#pragma once
// moe_experts on tensor cores: its tiles, up to 8 slots of an expert by 16 weight rows, as weight_stream.cuh wants
// them; and the job of all its kernels (moe.cu).
#include <cstdint>

#include "backends/cuda/expert_plan.h"
#include "backends/cuda_common/fast_division.cuh"
#include "backends/cuda_common/lanes.cuh"
#include "backends/cuda_common/ptx/prefetch.cuh"
#include "backends/cuda_common/values.cuh"
#include "backends/cuda_common/weight_stream.cuh"
#include "ops/moe/moe.h"

namespace tessera::backends::cuda::expert_tiles {

using namespace cuda_common;

// Up to kTokenTile slots of one expert.
struct Tile {
  int32_t expert, first, count;  // first: into Scratch::slots
};

// The same with all that kernels want to know of it at once.
struct Work {
  int32_t slots[kTokenTile];  // the last one again where there are fewer
  const void *data[3], *scales[3];
  float tensor_scales[3];  // of w1, w3, w2
  int32_t count;
};

// The workspace. A slot is (token, rank of the expert in its list); slots are grouped by expert, tokens ascending.
struct Scratch {
  float *x, *x_factors;     // [tokens, hidden], [tokens]: inputs as the multiply sees them, where that differs
  float *h, *h_factors;     // [slots, inner], [slots]. On tensor cores x and h are BF16, in the same memory
  int32_t *slots, *begins;  // [slots]; [num_local + 1] each local expert's range in `slots`
  int32_t* tile_begins;     // [num_local + 1] each local expert's range in `tiles`
  Tile* tiles;              // [max_tiles]
  Work* work;               // [max_tiles], where it is wanted
};

struct Job {
  Scratch scratch;
  const int32_t* experts;  // [slots] ascending in a token
  const float* routing;    // [slots]
  const ops::WeightView *w1, *w3, *w2;
  Values x;                            // [tokens, hidden]
  const float *x_factors, *h_factors;  // null: 1
  Values out;                          // [slots, hidden]
  int64_t hidden, inner, first_expert, num_local, top_k, num_slots;
  float limit;
  bool is_bf16, wants_work;
  bool lists_itself;     // the kernels group the slots, each for itself
  FastDivisor token_of;  // of a slot
};

// Slots of experts of other ranks are zero.
__device__ inline void zero_if_foreign(const Job& job, int64_t slot) {
  const int64_t expert = job.experts[slot] - job.first_expert;
  if (expert >= 0 && expert < job.num_local) return;
  for (int64_t i = threadIdx.x; i < job.hidden; i += blockDim.x) job.out.store(slot * job.hidden + i, 0);
}
// A block's share of them, by all its threads, whenever each comes.
__device__ inline void zero_foreign_slots(const Job& job) {
  for (int64_t slot = blockIdx.x; slot < job.num_slots; slot += gridDim.x) zero_if_foreign(job, slot);
}

// An expert's matrices, w1, w3 and w2.
struct Matrices {
  ops::WeightView views[3];
};

__device__ inline void fill_matrices(const Matrices& matrices, Work& work) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const ops::WeightView& view = matrices.views[i];
    work.data[i] = view.data, work.scales[i] = view.block_scales, work.tensor_scales[i] = view.tensor_scale;
  }
}

// Fills `job`, rounds inputs where the mode asks for it and, unless the kernels do, groups the slots and zeroes those
// of other ranks; the number of tiles to launch for.
unsigned begin(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, bool wants_work,
               device::Queue& queue, Job& job);
// Rounds h where the mode asks for it.
void round_h(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, DType dtype, const Job& job,
             device::Queue& queue);

static_assert(kTokenTile == kTileTokens);

// Where experts' matrices lie, into the L2 cache, by a few blocks: which experts' is not known yet.
__device__ inline void prefetch_matrices(const Job& job) {
  if (blockIdx.x >= 3) return;
  const ops::WeightView* views = blockIdx.x == 0 ? job.w1 : blockIdx.x == 1 ? job.w3 : job.w2;
  for (int64_t e = threadIdx.x; e < job.num_local; e += blockDim.x) ptx::prefetch(views + e);
}

// The entries that tiles are made of.
struct WorkList {
  const Work* entries;
  int count;
};
struct alignas(16) OwnList {
  Work entries[kFewExpertSlots];
  int count;
};

// By one warp, of at most kFewExpertSlots slots, an entry for up to kSlots of them.
template <int kSlots>
__device__ void list_few_slots(const Job& job, OwnList& s_list) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, num_slots = static_cast<int>(job.num_slots);
  const int64_t expert = lane < num_slots ? job.experts[lane] - job.first_expert : -1;
  const bool is_local = expert >= 0 && expert < job.num_local;
  unsigned alike = 0;  // slots of the same expert
  for (int slot = 0; slot < num_slots; ++slot) {
    if (__shfl_sync(~0u, static_cast<int>(expert), slot) == static_cast<int>(expert)) alike |= 1u << slot;
  }
  const unsigned before = (1u << lane) - 1;
  const int rank = __popc(alike & before);
  const bool is_first = is_local && rank % kSlots == 0;
  const unsigned firsts = __ballot_sync(~0u, is_first);
  if (lane == 0) s_list.count = __popc(firsts);
  if (!is_first) return;
  const Matrices matrices{{job.w1[expert], job.w3[expert], job.w2[expert]}};  // on their way while slots are listed
  Work& work = s_list.entries[__popc(firsts & before)];
  work.count = min(__popc(alike & ~before), kSlots);
  int last = lane, found = 0;
  for (int slot = lane; found < work.count; ++slot) {
    if ((alike >> slot & 1) != 0) work.slots[found++] = last = slot;
  }
  for (; found < kTokenTile; ++found) work.slots[found] = last;
  fill_matrices(matrices, work);
}

// All threads of the block.
template <int kSlots>
__device__ WorkList work_of(const Job& job, OwnList& s_list) {
  if (!job.lists_itself) return {job.scratch.work, job.scratch.tile_begins[job.num_local]};
  if (threadIdx.x < kWarp) list_few_slots<kSlots>(job, s_list);
  __syncthreads();
  return {s_list.entries, s_list.count};
}

// What both have in common: a tile is up to 8 slots of an expert by 16 of its `rows` rows.
class WorkTiles {
 public:
  struct Place {
    const Work* work;
    int32_t first_row;
  };
  __device__ WorkTiles(const Job& job, const WorkList& list, int64_t rows, FastDivisor row_tiles)
      : job_(job), list_(list), rows_(static_cast<int32_t>(rows)), row_tiles_(row_tiles) {}

  __device__ int count() const { return list_.count * static_cast<int>(row_tiles_.divisor()); }
  __device__ Place place(int tile) const {
    const uint32_t at = static_cast<uint32_t>(tile), entry = row_tiles_.quotient(at);
    return {list_.entries + entry, static_cast<int32_t>((at - entry * row_tiles_.divisor()) * kTileRows)};
  }

 protected:
  __device__ TileWeights weights_of(const Place& place, int matrix) const {
    return {place.work->data[matrix], place.work->scales[matrix], place.first_row, rows_};
  }
  __device__ static int32_t slot_of_lane(const Place& place) {
    return place.work->slots[static_cast<int>(threadIdx.x) % kWarp / 4];
  }
  __device__ bool is_there(const Place& place, int at) const {
    return place.first_row + streamed_row(at) < rows_ && streamed_token(at) < place.work->count;
  }

  const Job& job_;

 private:
  const WorkList list_;
  const int32_t rows_;
  const FastDivisor row_tiles_;
};

template <class Share>
class GateAndUpTiles final : public WorkTiles {
 public:
  static constexpr int kPasses = 2;
  static constexpr bool kIsFirst = true;
  __device__ GateAndUpTiles(const Job& job, const WorkList& list, FastDivisor row_tiles)
      : WorkTiles(job, list, job.inner, row_tiles) {}

  __device__ TileWeights weights(const Place& place, int pass) const { return weights_of(place, pass); }
  __device__ const uint16_t* inputs(const Place& place) const {
    return static_cast<const uint16_t*>(job_.x.data) + job_.token_of.quotient(slot_of_lane(place)) * job_.hidden;
  }
  // BF16 follows: FP32 is enough.
  static __device__ float near_exp(float x) { return expf(x); }
  struct Ticket {
    bool is_there;
    int32_t slot;
    float gate_scale, up_scale, routing;
  };
  __device__ Ticket ticket(const Place& place, int at) const {
    const int32_t slot = place.work->slots[streamed_token(at)];
    const float factor =
        job_.x_factors == nullptr ? 1.0f : job_.x_factors[job_.token_of.quotient(static_cast<uint32_t>(slot))];
    return {is_there(place, at), slot, factor * place.work->tensor_scales[0], factor * place.work->tensor_scales[1],
            job_.routing[slot]};
  }
  __device__ inline void store(const Place& place, int at, const float (&sums)[2], const Ticket& ticket) const {
    if (!ticket.is_there) return;
    const float gate = round_to(true, sums[0] * Share::kFactor * ticket.gate_scale);
    const float up = round_to(true, sums[1] * Share::kFactor * ticket.up_scale);
    Values{job_.scratch.h, true}.store(ticket.slot * job_.inner + place.first_row + streamed_row(at),
                                       swiglu_value(gate, up, job_.limit, near_exp) * ticket.routing);
  }
};

template <class Share>
class DownTiles final : public WorkTiles {
 public:
  static constexpr int kPasses = 1;
  static constexpr bool kIsFirst = false;
  __device__ DownTiles(const Job& job, const WorkList& list, FastDivisor row_tiles)
      : WorkTiles(job, list, job.hidden, row_tiles) {}

  __device__ TileWeights weights(const Place& place, int) const { return weights_of(place, 2); }
  __device__ const uint16_t* inputs(const Place& place) const {
    return reinterpret_cast<const uint16_t*>(job_.scratch.h) + slot_of_lane(place) * job_.inner;
  }
  struct Ticket {
    bool is_there;
    int32_t slot;
    float scale;
  };
  __device__ Ticket ticket(const Place& place, int at) const {
    const int32_t slot = place.work->slots[streamed_token(at)];
    const float factor = job_.h_factors == nullptr ? 1.0f : job_.h_factors[slot];
    return {is_there(place, at), slot, factor * place.work->tensor_scales[2]};
  }
  __device__ inline void store(const Place& place, int at, const float (&sums)[1], const Ticket& ticket) const {
    if (!ticket.is_there) return;
    job_.out.store(ticket.slot * job_.hidden + place.first_row + streamed_row(at),
                   sums[0] * Share::kFactor * ticket.scale);
  }
};

}  // namespace tessera::backends::cuda::expert_tiles
