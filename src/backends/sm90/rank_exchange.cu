// SPDX-License-Identifier: Apache-2.0
// What ranks of rank_experts send each other but for the experts' outputs: tokens' rows there, and their slots back.
// Bound by the link, and for few tokens by its latency: one way for rows, one for slots (device/expert_peers.h).
#include <algorithm>

#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/peer_packs.cuh"
#include "backends/sm90/rank_job.cuh"

namespace tessera::backends::sm90 {

namespace {

using namespace device::cuda;
using cuda_common::Pack, cuda_common::Values, cuda_common::wait_for_previous;
using device::ExpertPeers, device::ExpertPeersShape, device::PeerView;

// All blocks are in place at once, since they wait for other ranks: of so few threads two have room on a multiprocessor
// whatever else they need.
constexpr int kWarp = 32, kThreads = 256, kBlocksEach = 2;
constexpr int kAtOnce = 8;  // loads of a thread on their way together
constexpr int kCombineThreads = 256;

// Calls use(i, words[i]) for a thread's share of a row's slots, loads going ahead.
template <class Load, class Use>
__device__ void for_each_slot_of_row(int row_slots, const Load& load, const Use& use) {
  for (int first = static_cast<int>(threadIdx.x); first < row_slots; first += kAtOnce * kThreads) {
    uint64_t words[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int i = first + n * kThreads;
      words[n] = i < row_slots ? load(i) : 0;
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int i = first + n * kThreads;
      if (i < row_slots) use(i, words[n]);
    }
  }
}

__device__ void send_count(const RankExchangeJob& job, uint32_t call) {
  const PeerView& view = job.peers.view;
  const int receiver = static_cast<int>(threadIdx.x);
  if (blockIdx.x != 0 || receiver >= view.world || receiver == view.rank) return;
  *peer_slot(view, receiver, view.rank, call, 0) = peer_words(static_cast<uint32_t>(job.num_tokens), 0);
}

// Choices go to every rank, a row once to each that has one of its experts. A slot that nobody computes, such as one of
// padding, has come back at once, as zeros: so does moe_experts leave it. By a thread block.
__device__ void send_token(const RankExchangeJob& job, uint32_t call, int64_t token) {
  const PeerView& view = job.peers.view;
  const ExpertPeersShape& shape = job.peers.shape;
  const int top_k = static_cast<int>(shape.top_k), k = static_cast<int>(threadIdx.x);
  const int32_t* experts = job.experts + token * top_k;
  if (k < top_k) {
    const uint64_t words =
        peer_words(static_cast<uint32_t>(experts[k]), __float_as_uint(job.routing[token * top_k + k]));
    for (int r = 0; r < view.world; ++r) {
      if (r != view.rank) *peer_slot(view, r, view.rank, call, shape.choice_slot(token, k)) = words;
    }
  }
  unsigned receivers = 0;
  for (int i = 0; i < top_k; ++i) {
    const unsigned receiver = static_cast<unsigned>(experts[i]) / static_cast<unsigned>(job.num_local);
    if (receiver < static_cast<unsigned>(view.world)) {
      receivers |= 1u << receiver;
      continue;
    }
    volatile uint64_t* const slot = job.peers.returned(view.rank) + (token * top_k + i) * shape.row_slots();
    for (int64_t n = threadIdx.x; n < shape.row_slots(); n += kThreads) slot[n] = 0;
  }
  receivers &= ~(1u << view.rank);
  if (receivers == 0) return;
  const int64_t row = shape.row_slot(token);
  for_each_slot_of_row(
      static_cast<int>(shape.row_slots()), [&](int i) { return job.x[token * shape.row_slots() + i]; },
      [&](int i, uint64_t loaded) {
        const uint64_t words = peer_words(static_cast<uint32_t>(loaded), static_cast<uint32_t>(loaded >> 32));
        for (int r = 0; r < view.world; ++r) {
          if (receivers >> r & 1) *peer_slot(view, r, view.rank, call, row + i) = words;
        }
      });
}

// Of `sender`, which may be this rank; all blocks see the number, and the last one frees its slot.
__device__ int64_t tokens_of(const RankExchangeJob& job, uint32_t call, int sender) {
  const PeerView& view = job.peers.view;
  if (sender == view.rank) return job.num_tokens;
  const volatile uint64_t* slot = peer_slot(view, view.rank, sender, call, 0);
  return static_cast<uint32_t>(see_peer_words(view, slot, *slot));
}

// Takes in a token, or that there is none. By a thread block.
__device__ void collect_token(const RankExchangeJob& job, uint32_t call, int sender, int64_t token) {
  __shared__ bool s_has_local;
  const PeerView& view = job.peers.view;
  const ExpertPeersShape& shape = job.peers.shape;
  const int top_k = static_cast<int>(shape.top_k), k = static_cast<int>(threadIdx.x);
  const int64_t at = sender * job.most_tokens + token;
  const bool is_own = sender == view.rank, is_there = token < tokens_of(job, call, sender);
  const auto slot_of = [&](int64_t slot) { return peer_slot(view, view.rank, sender, call, slot); };
  if (k < kWarp) {
    int32_t expert = -1;
    if (k < top_k) {
      float weight = 0;
      if (is_there && is_own) {
        expert = job.experts[token * top_k + k], weight = job.routing[token * top_k + k];
      } else if (is_there) {
        volatile uint64_t* slot = slot_of(shape.choice_slot(token, k));
        const uint64_t words = wait_for_peer_words(view, slot, *slot);
        expert = static_cast<int32_t>(words), weight = __uint_as_float(static_cast<uint32_t>(words >> 32));
      }
      job.rows.experts[at * top_k + k] = expert, job.rows.routing[at * top_k + k] = weight;
    }
    const bool is_local = expert >= 0 && expert / static_cast<int32_t>(job.num_local) == view.rank;
    const bool has_local = __any_sync(~0u, is_local) != 0;
    if (k == 0) s_has_local = has_local;
  }
  __syncthreads();
  const bool has_local = s_has_local;
  __syncthreads();  // before the next token's
  if (!has_local) return;
  const int64_t row_slots = shape.row_slots(), row = shape.row_slot(token);
  uint64_t* const to = job.rows.x + at * row_slots;
  if (is_own) {
    for_each_slot_of_row(
        static_cast<int>(row_slots), [&](int i) { return job.x[token * row_slots + i]; },
        [&](int i, uint64_t words) { to[i] = words; });
  } else {
    for_each_slot_of_row(
        static_cast<int>(row_slots), [&](int i) { return *slot_of(row + i); },
        [&](int i, uint64_t words) { to[i] = wait_for_peer_words(view, slot_of(row + i), words); });
  }
}

// A rank has sent all before it waits for anything.
__global__ void __launch_bounds__(kThreads, kBlocksEach)
    exchange_rows_kernel(const __grid_constant__ RankExchangeJob job) {
  wait_for_previous();
  const PeerView& view = job.peers.view;
  const uint32_t call = begin_peer_call(view);
  if (job.sends) {
    send_count(job, call);
    for (int64_t token = blockIdx.x; token < job.num_tokens; token += gridDim.x) send_token(job, call, token);
  }
  if (!job.collects) return;
  if (blockIdx.x == 0 && threadIdx.x < static_cast<unsigned>(view.world)) {
    job.rows.returned[threadIdx.x] = job.peers.returned(static_cast<int>(threadIdx.x));
  }
  // One token of each rank, then the next: ranks send theirs in this order.
  const int64_t num_tokens = view.world * job.most_tokens;
  for (int64_t i = blockIdx.x; i < num_tokens; i += gridDim.x) {
    collect_token(job, call, static_cast<int>(i % view.world), i / view.world);
  }
  end_peer_call(view, call, gridDim.x, [&] {
    for (int r = 0; r < view.world; ++r) {
      if (r != view.rank) *peer_slot(view, view.rank, r, call, 0) = kNoPeerWords;
    }
  });
}

// A thread has four channels of a token. Nobody waits for this kernel's blocks, so they need not all be in place.
__global__ void __launch_bounds__(kCombineThreads)
    combine_returned_kernel(const __grid_constant__ ExpertPeers peers, Values shared, Values out, int64_t count) {
  constexpr int kValues = ExpertPeersShape::kValues;
  static_assert(kValues == cuda_common::kPeerValues);
  wait_for_previous();
  const int64_t at = cuda_common::item_index();
  if (at >= count) return;
  const int64_t row_slots = peers.shape.row_slots(), token = at / row_slots;
  const int top_k = static_cast<int>(peers.shape.top_k);
  volatile uint64_t* const first = peers.returned(peers.view.rank) + token * top_k * row_slots + at % row_slots;
  Pack<kValues> sum;
  const auto add = [&](const Pack<kValues>& term) {
#pragma unroll
    for (int n = 0; n < kValues; ++n) sum.v[n] += term.v[n];
  };
  for (int k = 0; k < top_k; k += kAtOnce) {
    uint64_t words[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) words[n] = k + n < top_k ? first[(k + n) * row_slots] : 0;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (k + n >= top_k) break;
      add(cuda_common::slot_values(wait_for_peer_words(peers.view, first + (k + n) * row_slots, words[n])));
    }
  }
  if (shared.data != nullptr) add(cuda_common::load_pack<kValues>(shared, at * kValues));
  cuda_common::store_pack(out, at * kValues, sum);
}

}  // namespace

void exchange_rows(const RankExchangeJob& job, const device::Queue& queue) {
  const int64_t tokens = std::max(job.num_tokens, job.collects ? job.peers.view.world * job.most_tokens : 1);
  const int64_t blocks = std::min<int64_t>(tokens, int64_t{kBlocksEach} * cuda_common::multiprocessors());
  cuda_common::launch("exchange_rows", queue, exchange_rows_kernel, dim3(static_cast<unsigned>(blocks)), kThreads, 0,
                      job);
}

void combine_returned(const ExpertPeers& peers, const TensorView& shared, const TensorView& out, int64_t num_tokens,
                      const device::Queue& queue) {
  const int64_t count = num_tokens * peers.shape.row_slots();
  cuda_common::launch("combine_returned", queue, combine_returned_kernel, cuda_common::grid_for(count, kCombineThreads),
                      kCombineThreads, 0, peers, cuda_common::values_of(shared), cuda_common::values_of(out), count);
}

}  // namespace tessera::backends::sm90
