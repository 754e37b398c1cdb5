// SPDX-License-Identifier: Apache-2.0
#pragma once
// all_experts by unit_ring.cuh: the shared expert's tiles, then those of the routed ones (cuda/expert_tiles.cuh), in
// one launch. What it stores are the bits of linear_group and linear: its activation has their exp, and no factor
// follows.
#include <cstdint>

#include "backends/cuda/expert_tiles.cuh"
#include "ops/all_experts/all_experts.h"

namespace tessera::backends::sm90 {

// Of up to 8 tokens; as wide as the routed ones.
struct SharedExpert {
  const void *data[3], *scales[3];  // w1, w3, w2
  float tensor_scales[3];
  cuda_common::Values h, out;  // BF16: [tokens, inner], [tokens, hidden]
  int num_tokens;
  float limit;
};

struct AllExpertsJob {
  cuda::expert_tiles::Job routed;
  SharedExpert shared;
};

inline SharedExpert shared_expert_of(const ops::AllExperts::Desc& desc, const ops::AllExperts::Args& args) {
  SharedExpert shared{};
  const ops::WeightView* const weights[] = {&args.gated.weights[0], &args.gated.weights[1], &args.down.weight};
  for (int i = 0; i < 3; ++i) {
    shared.data[i] = weights[i]->data, shared.scales[i] = weights[i]->block_scales;
    shared.tensor_scales[i] = weights[i]->tensor_scale;
  }
  shared.h = cuda_common::values_of(args.gated.y[0]), shared.out = cuda_common::values_of(args.down.y);
  shared.num_tokens = static_cast<int>(args.num_tokens);
  shared.limit = desc.gated.swiglu->limit;
  return shared;
}

// What both maps have in common. A place without work is the shared expert's, whose weights are SharedWeights
// (ring_weights.cuh).
template <class Routed, class SharedWeights>
class AllTiles {
 public:
  static constexpr ops::WeightFormat kSharedFormat = SharedWeights::kFormat;
  using Place = typename Routed::Place;
  static constexpr int kPasses = Routed::kPasses;
  static constexpr bool kIsFirst = Routed::kIsFirst;
  // `rows` of a matrix.
  __device__ AllTiles(const AllExpertsJob& job, const cuda::expert_tiles::WorkList& list, int64_t rows,
                      cuda_common::FastDivisor row_tiles)
      : job_(job),
        routed_(job.routed, list, row_tiles),
        rows_(static_cast<int>(rows)),
        num_shared_(static_cast<int>(row_tiles.divisor())) {}

  __device__ int count() const { return num_shared_ + routed_.count(); }
  __device__ int num_shared() const { return num_shared_; }
  __device__ Place place(int tile) const {
    if (tile < num_shared_) return {nullptr, tile * cuda_common::kTileRows};
    return routed_.place(tile - num_shared_);
  }

 protected:
  __device__ static bool is_shared(const Place& place) { return place.work == nullptr; }
  __device__ cuda_common::TileWeights shared_weights(const Place& place, int matrix) const {
    return {job_.shared.data[matrix], job_.shared.scales[matrix], place.first_row, rows_};
  }
  // This lane's token of the tile's.
  __device__ int shared_token() const {
    return min(static_cast<int>(threadIdx.x) % cuda_common::kWarp / 4, job_.shared.num_tokens - 1);
  }
  // Where a sum's row and token are stored; -1: nowhere. Rows are whole tiles.
  __device__ int shared_at(const Place& place, int at) const {
    const int token = cuda_common::streamed_token(at);
    return token < job_.shared.num_tokens ? token * rows_ + place.first_row + cuda_common::streamed_row(at) : -1;
  }

  const AllExpertsJob& job_;
  const Routed routed_;

 private:
  const int rows_, num_shared_;
};

template <class Share, class SharedWeights>
class AllGateAndUpTiles final : public AllTiles<cuda::expert_tiles::GateAndUpTiles<Share>, SharedWeights> {
  using Routed = cuda::expert_tiles::GateAndUpTiles<Share>;
  using Base = AllTiles<Routed, SharedWeights>;

 public:
  using typename Base::Place;
  // Less than Routed's: it lies in registers while sums are worked out, and there are no more.
  struct Ticket {
    float routing;
  };
  __device__ AllGateAndUpTiles(const AllExpertsJob& job, const cuda::expert_tiles::WorkList& list,
                               cuda_common::FastDivisor row_tiles)
      : Base(job, list, job.routed.inner, row_tiles) {}

  __device__ cuda_common::TileWeights weights(const Place& place, int pass) const {
    return Base::is_shared(place) ? Base::shared_weights(place, pass) : this->routed_.weights(place, pass);
  }
  __device__ const uint16_t* inputs(const Place& place) const {
    if (!Base::is_shared(place)) return this->routed_.inputs(place);
    return static_cast<const uint16_t*>(this->job_.routed.x.data) + Base::shared_token() * this->job_.routed.hidden;
  }
  __device__ Ticket ticket(const Place& place, int at) const {
    if (Base::is_shared(place)) return {1};
    return {this->job_.routed.routing[place.work->slots[cuda_common::streamed_token(at)]]};
  }
  __device__ void store(const Place& place, int at, const float (&sums)[2], const Ticket& ticket) const {
    if (!Base::is_shared(place)) {
      // Inputs are as they are, without factors.
      const cuda::expert_tiles::Work& work = *place.work;
      const int token = cuda_common::streamed_token(at);
      return this->routed_.store(
          place, at, sums,
          {token < work.count, work.slots[token], work.tensor_scales[0], work.tensor_scales[1], ticket.routing});
    }
    const SharedExpert& shared = this->job_.shared;
    const int to = Base::shared_at(place, at);
    if (to < 0) return;
    const auto rounded = [&](int i) {
      return cuda_common::round_to(true, sums[i] * SharedWeights::Share::kFactor * shared.tensor_scales[i]);
    };
    shared.h.store(to, cuda_common::swiglu_value(rounded(0), rounded(1), shared.limit));
  }
};

template <class Share, class SharedWeights>
class AllDownTiles final : public AllTiles<cuda::expert_tiles::DownTiles<Share>, SharedWeights> {
  using Routed = cuda::expert_tiles::DownTiles<Share>;
  using Base = AllTiles<Routed, SharedWeights>;

 public:
  using typename Base::Place;
  using Ticket = typename Routed::Ticket;
  __device__ AllDownTiles(const AllExpertsJob& job, const cuda::expert_tiles::WorkList& list,
                          cuda_common::FastDivisor row_tiles)
      : Base(job, list, job.routed.hidden, row_tiles) {}

  __device__ cuda_common::TileWeights weights(const Place& place, int pass) const {
    return Base::is_shared(place) ? Base::shared_weights(place, 2) : this->routed_.weights(place, pass);
  }
  __device__ const uint16_t* inputs(const Place& place) const {
    if (!Base::is_shared(place)) return this->routed_.inputs(place);
    return static_cast<const uint16_t*>(this->job_.shared.h.data) + Base::shared_token() * this->job_.routed.inner;
  }
  __device__ Ticket ticket(const Place& place, int at) const {
    return Base::is_shared(place) ? Ticket{} : this->routed_.ticket(place, at);
  }
  __device__ void store(const Place& place, int at, const float (&sums)[1], const Ticket& ticket) const {
    if (!Base::is_shared(place)) return this->routed_.store(place, at, sums, ticket);
    const int to = Base::shared_at(place, at);
    if (to < 0) return;
    this->job_.shared.out.store(to, sums[0] * SharedWeights::Share::kFactor * this->job_.shared.tensor_scales[2]);
  }
};

}  // namespace tessera::backends::sm90
