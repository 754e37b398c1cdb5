// SPDX-License-Identifier: Apache-2.0
#pragma once
// What moe_combine and mhc_post compute (ops/moe, ops/mhc), value by value: ops of their own and steps of a fused one.
#include <cstdint>

#include "backends/cuda_common/values.cuh"
#include "base/host_device.h"
#include "ops/mhc/mhc.h"

namespace tessera::backends::cuda_common {

// Neighbouring values of a row: four where all rows begin at multiples of four, else one.
template <int kWide>
struct Pack {
  float v[kWide] = {};
};
TESSERA_HOST_DEVICE constexpr bool has_packs(int64_t width) {
  return width % 4 == 0;
}

// A pack of BF16 as it lies, and its values.
__device__ inline uint2 load_bf16_words(const Values& x, int64_t i) {
  return *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(x.data) + i);
}
__device__ inline Pack<4> pack_of(const uint2& words) {
  return {{__uint_as_float(words.x << 16), __uint_as_float(words.x & 0xFFFF0000), __uint_as_float(words.y << 16),
           __uint_as_float(words.y & 0xFFFF0000)}};
}

template <int kWide>
__device__ Pack<kWide> load_pack(const Values& x, int64_t i) {
  Pack<kWide> pack;
  if constexpr (kWide == 1) {
    pack.v[0] = x[i];
  } else if (x.is_bf16) {
    static_assert(kWide == 4);
    pack = pack_of(load_bf16_words(x, i));
  } else {
    const float4 values = *reinterpret_cast<const float4*>(static_cast<const float*>(x.data) + i);
    pack.v[0] = values.x, pack.v[1] = values.y, pack.v[2] = values.z, pack.v[3] = values.w;
  }
  return pack;
}

template <int kWide>
__device__ void store_pack(const Values& x, int64_t i, const Pack<kWide>& pack) {
  if constexpr (kWide == 1) {
    x.store(i, pack.v[0]);
  } else if (x.is_bf16) {
    const auto word = [&](int n) {
      return static_cast<uint32_t>(numeric::bf16_from_float(pack.v[n])) |
             static_cast<uint32_t>(numeric::bf16_from_float(pack.v[n + 1])) << 16;
    };
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(x.data) + i) = uint2{word(0), word(2)};
  } else {
    *reinterpret_cast<float4*>(static_cast<float*>(x.data) + i) = float4{pack.v[0], pack.v[1], pack.v[2], pack.v[3]};
  }
}

template <int kWide>
__device__ void round_pack(bool is_bf16, Pack<kWide>& pack) {
#pragma unroll
  for (int n = 0; n < kWide; ++n) pack.v[n] = round_to(is_bf16, pack.v[n]);
}

constexpr int kSlotsAtOnce = 8;  // of a token's experts, loads on their way together

// Of moe_combine, without its rounding: slots ascend, the shared expert comes last.
struct ExpertSum {
  Values routed, shared;  // data null: bypassed
  int64_t top_k = 0, hidden = 0;

  // kAtOnce: slots that the loop is unrolled by. Each is asked whether it is F32 or BF16, so that loads stay apart.
  template <int kWide, int kAtOnce>
  __device__ Pack<kWide> at(int64_t t, int64_t c) const {
    Pack<kWide> sum;
    if (routed.data != nullptr) {
#pragma unroll kAtOnce
      for (int64_t slot = 0; slot < top_k; ++slot) add(load_pack<kWide>(routed, index(t, slot, c)), sum);
    }
    if (shared.data != nullptr) add(load_pack<kWide>(shared, t * hidden + c), sum);
    return sum;
  }
  // The same of slots in BF16, so many of which are on their way together: in registers that not every kernel has.
  template <int kTogether>
  __device__ Pack<4> of_bf16(int64_t t, int64_t c) const {
    Pack<4> sum;
    for (int64_t slot = routed.data == nullptr ? top_k : 0; slot < top_k; slot += kTogether) {
      uint2 words[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (slot + i < top_k) words[i] = load_bf16_words(routed, index(t, slot + i, c));
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (slot + i < top_k) add(pack_of(words[i]), sum);
      }
    }
    if (shared.data != nullptr) add(load_pack<4>(shared, t * hidden + c), sum);
    return sum;
  }
  // of_bf16 where slots are BF16 and packs are of four, else at.
  template <int kWide, int kTogether>
  __device__ Pack<kWide> together(int64_t t, int64_t c) const {
    if constexpr (kWide == 4) {
      if (routed.is_bf16) return of_bf16<kTogether>(t, c);
    }
    return at<kWide, 1>(t, c);
  }

 private:
  __device__ int64_t index(int64_t t, int64_t slot, int64_t c) const {
    return (t * top_k + slot) * hidden + c;
  }
  template <int kWide>
  __device__ static void add(const Pack<kWide>& term, Pack<kWide>& sum) {
#pragma unroll
    for (int n = 0; n < kWide; ++n) sum.v[n] += term.v[n];
  }
};

// Of mhc_post.
struct StreamWrite {
  Values x;  // [tokens, 4, hidden]: the streams before
  Values o;  // [tokens, hidden]: what the sublayer wrote; data null: `experts`
  ExpertSum experts;
  const float *post = nullptr, *comb = nullptr;
  Values out;  // [tokens, 4, hidden]
  int64_t hidden = 0;

  // What a token's channels have to do with each other.
  template <int kWide>
  struct Inputs {
    Pack<kWide> streams[ops::kHcStreams], o;
  };
  template <int kWide>
  __device__ void load_streams(int64_t t, int64_t c, Pack<kWide> (&streams)[ops::kHcStreams]) const {
#pragma unroll
    for (int j = 0; j < ops::kHcStreams; ++j) streams[j] = load_pack<kWide>(x, (t * ops::kHcStreams + j) * hidden + c);
  }
  // kAreTogether: ExpertSum::together, else at.
  template <int kWide, int kAtOnce, bool kAreTogether = false>
  __device__ Inputs<kWide> load(int64_t t, int64_t c) const {
    Inputs<kWide> in;
    load_streams(t, c, in.streams);
    if (o.data != nullptr) {
      in.o = load_pack<kWide>(o, t * hidden + c);
    } else {
      in.o = kAreTogether ? experts.template together<kWide, kAtOnce>(t, c) : experts.template at<kWide, kAtOnce>(t, c);
      round_pack(x.is_bf16, in.o);
    }
    return in;
  }
  // What stream k is given of the sublayer's output, by this factor, and of the streams before.
  __device__ float factor(int64_t t, int k) const {
    return post[t * ops::kHcStreams + k];
  }
  template <int kWide>
  __device__ Pack<kWide> mixed(int64_t t, int k, const Pack<kWide> (&streams)[ops::kHcStreams]) const {
    Pack<kWide> sum;
#pragma unroll
    for (int n = 0; n < kWide; ++n) {
#pragma unroll
      for (int j = 0; j < ops::kHcStreams; ++j) {
        sum.v[n] += comb[(t * ops::kHcStreams + j) * ops::kHcStreams + k] * streams[j].v[n];
      }
    }
    return sum;
  }
  // The two together, without rounding.
  template <int kWide>
  __device__ static Pack<kWide> written(float factor, const Pack<kWide>& o, const Pack<kWide>& mixed) {
    Pack<kWide> written;
#pragma unroll
    for (int n = 0; n < kWide; ++n) written.v[n] = factor * o.v[n] + mixed.v[n];
    return written;
  }
  template <int kWide>
  __device__ Pack<kWide> stream(int64_t t, int k, const Inputs<kWide>& in) const {
    return written(factor(t, k), in.o, mixed(t, k, in.streams));
  }
};

}  // namespace tessera::backends::cuda_common
