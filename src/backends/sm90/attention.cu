// SPDX-License-Identifier: Apache-2.0
// attention by wgmma: a thread block takes 64 heads of a token, which share every key, part after part (ops/attention).
// A key is brought and made BF16 once for all heads; keys are values too, so both products read the same copy.
//   consumers  two warpgroups: of a part's logits each has 64 keys, of the output every other block of 64 channels
//   producers  two warpgroups that fill blocks of 64 channels, ahead of the products: of the next part as soon as the
//              part before has been multiplied by the probabilities, of the next token's queries as soon as logits are;
//              in turn they find the next part's keys meanwhile
// What bounds it: a part's chain of products, probabilities and merging, then the tensor cores' BF16 products and
// shared memory, which gives them their operands. Bringing and converting keys bound it while that took twice the
// instructions; all of them take most of what a scheduler can issue in that time. Few tokens are spread over thread
// blocks by parts and by output channels, and a second kernel merges parts; how a token's sums are formed depends on
// neither. A handful has attention_few.cu's kernel or the portable one, whose bits are the same.
//   channels   block b of 64 lies in rows of 128 bytes (ptx::SharedOperand); its channel 16 t + 4 k + i stands at
//              16 k + 4 t + i: a step k of a product has the same channels as in the portable kernel, and what eight
//              bytes of a key become is stored by eights
#include <algorithm>

#include "backends/cuda/kernels.h"
#include "backends/cuda_common/ptx/registers.cuh"
#include "backends/sm90/attention_keys.cuh"
#include "backends/sm90/kernels.h"

namespace tessera::backends::sm90 {

namespace {

using namespace attention_wide;

// Lane (g, t) of warp w of a warpgroup has heads 16 w + g + 8 r. kIsSpread: parts' results go to the workspace.
template <bool kIsSpread>
class Consumer {
 public:
  __device__ Consumer(const Job& job, Shared& s)
      : job_(job),
        s_(s),
        row_(static_cast<int>(threadIdx.x) % kWarpgroup / kWarp * 16 + static_cast<int>(threadIdx.x) % kWarp / 4),
        t_(static_cast<int>(threadIdx.x) % 4) {}

  __device__ void run() {
    for (int item = first_item(); item < num_items(job_); item += static_cast<int>(gridDim.x)) {
      kIsSpread ? run_spread(item) : run_whole(item);
    }
  }

 private:
  // A token whose parts this thread block has all. Logits and values' sums are one array: in two they would take twice
  // the registers.
  __device__ void run_whole(int item) {
    float total[kBlocks / 2][32] = {}, sums[32] = {};
    float2 state[2] = {{-__builtin_huge_valf(), 0}, {-__builtin_huge_valf(), 0}};
    for (bool is_last = false; !is_last; ++n_) {
      float2 factors[2];
      const Part part = find_probabilities(sums, factors);
      is_last = part.is_last;
#pragma unroll
      for (int r = 0; r < 2; ++r) factors[r] = cuda_common::merge_factors(state[r], factors[r]);
#pragma unroll
      for (int j = 0; j < kBlocks / 2; ++j) {
        if (is_mine(j)) {
          multiply_values(j, part.count, sums);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            if (factors[r].x < 0) continue;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
              float& value = of_row(total[j], r, i);
              value = value * factors[r].x + of_row(sums, r, i) * factors[r].y;
            }
          }
        }
        s_.free[block_of(j)].arrive();
      }
    }
    store_total(item, state, total);
  }

  __device__ void run_spread(int item) {
    float sums[32] = {};
    for (bool is_last = false; !is_last; ++n_) {
      float2 state[2];
      const Part part = find_probabilities(sums, state);
      is_last = part.is_last;
      store_states(item, part.index, state);
#pragma unroll 1
      for (int j = 0; j < kBlocks / 2; ++j) {
        if (is_mine(j)) {
          multiply_values(j, part.count, sums);
          store_sums(item, part.index, j, sums);
        }
        s_.free[block_of(j)].arrive();
      }
    }
  }

  // Output channels are dealt out over gridDim.y thread blocks, a power of two, too.
  __device__ bool is_mine(int j) const {
    return (static_cast<unsigned>(j) & (gridDim.y - 1)) == blockIdx.y;
  }
  __device__ int block_of(int j) const {
    return 2 * j + group();
  }
  // The warpgroup, as one value for a warp, all of whose lanes ask. Worked out where it is needed: addresses that
  // follow from it would take registers all the time.
  __device__ static int group() {
    return __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  }
  __device__ static int lane_in_group() {
    return static_cast<int>(threadIdx.x) % kWarpgroup;
  }

  // What a lane holds of head row_ + 8 r of 64 columns: those at 8 (i / 2) + 2 t + i % 2.
  __device__ static float& of_row(float (&sums)[32], int r, int i) {
    return sums[i / 2 * 4 + 2 * r + i % 2];
  }

  // A row's lanes are four.
  __device__ static float largest_of_row(float value) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
    return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
  }
  __device__ static float sum_of_row(float value) {
    value += __shfl_xor_sync(~0u, value, 1);
    return value + __shfl_xor_sync(~0u, value, 2);
  }

  // Products of the queries with this warpgroup's keys.
  __device__ void multiply_keys(float (&sums)[32]) {
    const int my_group = group();
#pragma unroll 1
    for (int b = 0; b < kBlocks; ++b) {  // not unrolled: addresses worked out ahead would be too many registers
      if (b > 0) s_.full[b].wait(n_ & 1);
      const auto queries = ptx::SharedOperand::of(s_.queries[b], kEightRows);
      const auto keys = ptx::SharedOperand::of(s_.keys[b] + my_group * 64 * kRowBytes, kEightRows);
      ptx::begin_products();
#pragma unroll
      for (int k = 0; k < kRowBytes; k += 32) ptx::wgmma_bf16_shared(sums, queries + k, keys + k, b > 0 || k > 0);
      ptx::commit_products();
    }
    ptx::wait_for_products<0>();
  }

  // The next part's: its probabilities, rounded, in shared memory, its maximum and the sum of what was rounded.
  __device__ Part find_probabilities(float (&logits)[32], float2 (&state)[2]) {
    s_.full[0].wait(n_ & 1);
    const Part part = s_.parts[n_ % Shared::kParts];
    const int my_group = group();
    if (my_group == 0 || part.count > kPart / 2) {
      multiply_keys(logits);
    } else {  // this warpgroup has none of the keys
      for (int b = 1; b < kBlocks; ++b) s_.full[b].wait(n_ & 1);
    }
    if (part.is_last) s_.queries_free.arrive();
#pragma unroll
    for (float& logit : logits) logit *= job_.scale;
    if (part.count < kPart) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int key = my_group * 64 + i / 2 * 8 + 2 * t_ + i % 2;
          if (key >= part.count) of_row(logits, r, i) = -__builtin_huge_valf();
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {  // a NaN shows in the sum
      float max = -__builtin_huge_valf();
#pragma unroll
      for (int i = 0; i < 16; ++i) max = fmaxf(max, of_row(logits, r, i));
      state[r].x = largest_of_row(max);
      if (t_ == 0) s_.max[my_group][row_ + 8 * r] = state[r].x;
    }
    s_.have_max.arrive();
    s_.have_max.wait(n_ & 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      state[r].x = fmaxf(state[r].x, s_.max[my_group ^ 1][row_ + 8 * r]);
      const float base = cuda_common::probability_base(state[r].x);
      float sums[4] = {};  // of 16 keys
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float& p = of_row(logits, r, i);
        p = cuda_common::probability(p, base);
        sums[i / 4] += p;
      }
      state[r].y = sum_of_row((sums[0] + sums[1]) + (sums[2] + sums[3]));
      if (t_ == 0) s_.sum[my_group][row_ + 8 * r] = state[r].y;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_ + 8 * r;
      char* to = s_.probabilities[my_group] + row * kRowBytes + 4 * t_;
#pragma unroll
      for (int i = 0; i < 16; i += 2) {
        const uint32_t pair = ptx::round_to_bf16x2(of_row(logits, r, i), of_row(logits, r, i + 1));
        *reinterpret_cast<uint32_t*>(to + (i / 2 ^ row % 8) * 16) = pair;
      }
    }
    ptx::show_to_products();
    s_.have_probabilities.arrive();
    s_.have_probabilities.wait(n_ & 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      state[r].y = s_.sum[0][row_ + 8 * r] + s_.sum[1][row_ + 8 * r];
      if (state[r].y != state[r].y) state[r].x = state[r].y;
    }
    return part;
  }

  // Sums of a block's 64 channels.
  __device__ void multiply_values(int j, int count, float (&sums)[32]) {
    count > kPart / 2 ? multiply_values<2>(j, sums) : multiply_values<1>(j, sums);
  }
  // Of 64 kHalves keys.
  template <int kHalves>
  __device__ void multiply_values(int j, float (&sums)[32]) {
    const auto values = ptx::SharedOperand::of(s_.keys[block_of(j)], kEightRows);
    ptx::begin_products();
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const auto probabilities = ptx::SharedOperand::of(s_.probabilities[half], kEightRows);
#pragma unroll
      for (int k = 0; k < kRowBytes; k += 32) {
        ptx::wgmma_bf16_shared_rows(sums, probabilities + k, values + (half * 64 + k / 2) * kRowBytes,
                                    half > 0 || k > 0);
      }
    }
    ptx::commit_products();
    ptx::wait_for_products<0>();
  }

  // Of the lane's 16 channels of block j, for head row_ + 8 r.
  __device__ int head_of(int item, int r) const {
    return first_head_of(job_, item) + row_ + 8 * r;
  }
  __device__ int channel_of(int j) const {
    return block_of(j) * kGroup + (t_ % 2 * 2 + t_ / 2) * 16;
  }
  __device__ int64_t slot_of(int item, int part, int head) const {
    return (token_of(job_, item) * job_.slots + part) * job_.heads + head;
  }

  __device__ void store_states(int item, int part, const float2 (&state)[2]) const {
    if (group() != 0 || t_ != 0 || blockIdx.y != 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = head_of(item, r);
      if (head < job_.heads) job_.states[slot_of(item, part, head)] = state[r];
    }
  }
  // A lane's columns of a block are two channels each of 8 fours, which it shares with the lane beside it: 16 t' + 4 k
  // + 2 (t % 2) with t' = 2 h + t / 2 at index 2 k + h. Afterwards each has the four fours of one t' (channel_of).
  template <class T>
  __device__ void bring_in_order(const T (&held)[8], T (&fours)[8]) const {
    const bool is_odd = t_ % 2 != 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const T &first = held[2 * k], &second = held[2 * k + 1];
      const T got = from_neighbour(is_odd ? first : second);
      fours[2 * k] = is_odd ? got : first;
      fours[2 * k + 1] = is_odd ? second : got;
    }
  }
  __device__ static uint32_t from_neighbour(uint32_t pair) {
    return __shfl_xor_sync(~0u, pair, 1);
  }
  __device__ static float2 from_neighbour(float2 pair) {
    return {__shfl_xor_sync(~0u, pair.x, 1), __shfl_xor_sync(~0u, pair.y, 1)};
  }

  __device__ void store_sums(int item, int part, int j, float (&sums)[32]) const {
    const int channel = channel_of(j);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float2 held[8], fours[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) held[i] = {of_row(sums, r, 2 * i), of_row(sums, r, 2 * i + 1)};
      bring_in_order(held, fours);
      const int head = head_of(item, r);
      if (head >= job_.heads) continue;
      float4* to = reinterpret_cast<float4*>(job_.outputs + slot_of(item, part, head) * kWidth + channel);
#pragma unroll
      for (int i = 0; i < 8; i += 2) to[i / 2] = {fours[i].x, fours[i].y, fours[i + 1].x, fours[i + 1].y};
    }
  }
  __device__ void store_total(int item, float2 (&state)[2], float (&total)[kBlocks / 2][32]) const {
    const int first_channel = channel_of(0);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = head_of(item, r);
      const float factor = head < job_.heads ? cuda_common::last_factor(state[r], job_.sink[head]) : 0;
      uint16_t* row = job_.out + (token_of(job_, item) * job_.heads + head) * kWidth;
#pragma unroll
      for (int j = 0; j < kBlocks / 2; ++j) {
        if (!is_mine(j)) continue;
        uint32_t held[8], fours[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          held[i] = ptx::round_to_bf16x2(of_row(total[j], r, 2 * i) * factor, of_row(total[j], r, 2 * i + 1) * factor);
        }
        bring_in_order(held, fours);
        if (head >= job_.heads) continue;
        uint4* to = reinterpret_cast<uint4*>(row + first_channel + 2 * j * kGroup);
        to[0] = {fours[0], fours[1], fours[2], fours[3]};
        to[1] = {fours[4], fours[5], fours[6], fours[7]};
      }
    }
  }

  const Job& job_;
  Shared& s_;
  const int row_, t_;
  int n_ = 0;  // parts so far
};

// Grid: thread blocks that share the items; blocks over which output channels, blocks over which parts are dealt out.
template <ops::EntryFormat kFormat>
__global__ void __launch_bounds__(kThreads, 1) wide_attention(Job job) {
  Shared& s = *cuda_common::swizzled_shared<Shared>();
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kBlocks) s.full[thread].init(arrivals_of(thread)), s.free[thread].init(kWarpgroup);
  if (thread < Shared::kParts) {
    s.found[thread].init(kPart), s.have_scales[thread].init(kPart);
    s.has_great_scale[thread] = false;
  }
  if (thread == 0) {
    s.queries_free.init(kConsumers);
    s.have_max.init(kConsumers);
    s.have_probabilities.init(kConsumers);
  }
  __syncthreads();
  cuda_common::wait_for_previous();
  if (blockIdx.z > 0) {
    const int num_parts = Keys::of_token(job, token_of(job, first_item())).num_parts;
    if (static_cast<int>(blockIdx.z) >= (is_spread(job, num_parts) ? num_parts : 1)) return;
  }
  if (thread >= kConsumers) {
    ptx::give_registers_back<kProducerRegisters>();
    Producer<kFormat>(job, s).run();
  } else {
    ptx::take_registers<kConsumerRegisters>();
    const bool spread = gridDim.z > 1 && is_spread(job, Keys::of_token(job, token_of(job, first_item())).num_parts);
    spread ? Consumer<true>(job, s).run() : Consumer<false>(job, s).run();
  }
}

}  // namespace

bool attention_supports(const ops::Attention::Desc& desc, std::string& why_not) {
  const ops::EntryLayout& layout = desc.layout;
  if (desc.activation != DType::kBF16 ||
      (layout.format != ops::EntryFormat::kBf16 && layout.format != ops::EntryFormat::kKvFp8Bf16)) {
    why_not = "needs BF16 queries and keys in FP8 or BF16";
  } else if (desc.head_dim != kWidth || layout.rope_dim != kGroup) {
    why_not = "needs a head dimension of 512, 64 of it rotary";
  } else if (desc.heads < kHeads / 4) {
    why_not = "multiplies 64 heads at once, as slow for fewer than 16 as the portable kernel";
  } else {
    return true;
  }
  return false;
}

int64_t attention_workspace(const ops::Attention::Desc& desc, int64_t most_tokens) {
  return std::max(cuda_common::attention_parts_workspace(desc, kSlots),
                  cuda::attention_mma_workspace(desc, most_tokens));
}

namespace {

// Whether it has rotated `out`, where that is asked for.
bool run_attention(const ops::Attention::Desc& desc, const ops::Attention::Args& args,
                   const cuda_common::OutRotation& rotation, device::Queue& queue) {
  if (args.num_tokens == 0) return true;
  // Parts that a token may have; of visible entries without a list nobody knows here, and Flash has four of a list.
  constexpr int64_t kPartsOfEntries = 4, kMostSplits = 16;
  const int64_t window_parts = ceil_div<int64_t>(desc.window, kPart);
  const int64_t parts = !args.entry_cache.exists() ? window_parts
                        : args.selected == nullptr ? window_parts + kPartsOfEntries
                                                   : window_parts + ceil_div<int64_t>(args.selected_stride, kPart);
  const int64_t few_blocks = args.num_tokens * ceil_div<int64_t>(desc.heads, 16) * parts;
  if (few_blocks <= kFewClusters) {
    const bool knows_parts = !args.entry_cache.exists() || args.selected != nullptr;
    if (knows_parts) return attention_few(desc, args, std::min(parts, kMostSplits), rotation, queue);
    // Clusters of four for eight blocks to a multiprocessor; those without a part end at once.
    const int64_t items = args.num_tokens * ceil_div<int64_t>(desc.heads, 16);
    const int64_t splits = std::max(kMostSplits, 2 * cuda_common::multiprocessors() / items);
    return attention_few(desc, args, splits, rotation, queue);
  }
  if (parts > 1 && args.num_tokens <= kFewTokens && few_blocks <= kFewBlocks) {
    return cuda::run_attention_mma(desc, args, rotation, queue);
  }
  const int64_t items = args.num_tokens * ceil_div<int64_t>(desc.heads, kHeads);
  const int64_t multiprocessors = cuda_common::multiprocessors();
  const bool is_spread = parts > 1 && items <= kMostSpread;
  const Job job = cuda_common::attention_job(desc, args, is_spread ? kSlots : 0);
  // Where parts are spread a thread block has one item: how many parts that has says which blocks have work at all.
  // Channels are dealt out where parts leave multiprocessors over.
  dim3 grid(static_cast<unsigned>(is_spread ? items : std::min(items, multiprocessors)));
  const int64_t blocks = items * (is_spread ? parts : 1);
  grid.y = 4 * blocks <= multiprocessors ? 4 : 2 * blocks <= multiprocessors ? 2 : 1;
  if (is_spread) {
    grid.z = static_cast<unsigned>(
        std::clamp<int64_t>(multiprocessors / (items * grid.y), 2, std::max<int64_t>(2, job.slots)));
  }
  const bool is_fp8 = desc.layout.format == ops::EntryFormat::kKvFp8Bf16;
  cuda_common::launch("wide_attention", queue,
                      is_fp8 ? wide_attention<ops::EntryFormat::kKvFp8Bf16> : wide_attention<ops::EntryFormat::kBf16>,
                      grid, kThreads, sizeof(Shared), job);
  if (is_spread) cuda_common::launch_attention_merge<kSlots>(queue, job, rotation);
  return is_spread;
}

}  // namespace

void attention(const ops::Attention::Desc& desc, const ops::Attention::Args& args, device::Queue& queue) {
  run_attention(desc, args, {}, queue);
}

bool attention_rope_supports(const ops::AttentionRope::Desc& desc, std::string& why_not) {
  return cuda_common::rotates_by_fours(desc, why_not) && attention_supports(desc.attention, why_not);
}

int64_t attention_rope_workspace(const ops::AttentionRope::Desc& desc, int64_t max_tokens) {
  return attention_workspace(desc.attention, max_tokens);
}

void attention_rope(const ops::AttentionRope::Desc& desc, const ops::AttentionRope::Args& args, device::Queue& queue) {
  cuda_common::attend_and_rotate(desc, args, queue, run_attention, cuda::rope);
}

}  // namespace tessera::backends::sm90
