// SPDX-License-Identifier: Apache-2.0
#pragma once
// The ops between the large products, on rows of BF16: what one instruction set exports, as plain functions. Every
// width is a multiple of kRowStep. Unless said otherwise a kernel gives the reference's bits: the same operations in
// the same order, sums of products in the 16 lanes of ops/reference_rows.h.
#include <cstdint>

namespace tessera::backends::cpu_common {

constexpr int64_t kRowStep = 16;
constexpr int kMixTokens = 4;   // most tokens of a call of `mix`
constexpr int kMixStreams = 4;  // ops::kHcStreams

constexpr float kRouteError = 1e-5f, kRouteFloor = 1e-18f;

struct RowKernels {
  // weight: BF16, or FP32 with is_weight_f32, or null.
  void (*rms_norm)(const uint16_t* x, const void* weight, bool is_weight_f32, int64_t width, float eps,
                   int64_t num_rows, uint16_t* out);
  // squares[t] = x[t] . x[t], unless null, and m[t * num_fn + c] = fn[c] . x[t] for num_tokens <= kMixTokens rows of
  // `width`.
  void (*mix)(const uint16_t* x, int64_t num_tokens, const float* fn, int64_t num_fn, int64_t width, float* squares,
              float* m);
  // y = sum of pre[j] * streams[j].
  void (*mhc_read)(const uint16_t* streams, const float* pre, int64_t hidden, uint16_t* y);
  // out[k] = post[k] * o + sum of comb[j][k] * streams[j]; out may be streams.
  void (*mhc_write)(const uint16_t* streams, const uint16_t* o, const float* post, const float* comb, int64_t hidden,
                    uint16_t* out);
  // Interleaved pairs of num_vectors parts of rope_dim, `stride` apart; cosine and sine once per value, the sines of
  // even values negated.
  void (*rotate)(uint16_t* x, const float* cosine, const float* sine, int64_t num_vectors, int64_t stride,
                 int64_t rope_dim);
  // Within a unit or two of the exponential's last place.
  void (*swiglu)(const uint16_t* gate, const uint16_t* up, float limit, int64_t count, uint16_t* out);
  // out = ((start + rows[0]) + rows[1]) + ...; out may be any row. A start of -0 leaves a first -0 as it is.
  void (*add_rows)(float start, const uint16_t* const* rows, int64_t num_rows, int64_t count, uint16_t* out);
  // Walsh-Hadamard, times `factor`; is_fp4: then through E2M1 by 32 and back. width: a power of two, at most 512.
  void (*hadamard)(uint16_t* x, int64_t width, float factor, bool is_fp4, int64_t num_rows);
  // E4M3 codes of `nope` values (by 64) and their scales.
  void (*encode_e4m3)(const uint16_t* x, int64_t nope, uint8_t* codes, uint8_t* scales);
  // Online softmax of compressor_pool over channels [begin, end), multiples of kRowStep; close, not equal.
  void (*pool_online)(const struct PoolJob& job, int64_t begin, int64_t end);
  void (*pool_overlap)(const struct PoolJob& job, int64_t begin, int64_t end);
  // The largest of `count` values, a multiple of kRowStep; NaN is passed over, minus infinity where there is no other.
  float (*largest)(const float* x, int64_t count);
  // scores[e] = sqrt(softplus(logits[e])) + bias[e] for `count` experts, a multiple of kRowStep. Not the reference's
  // bits: within kRouteError * (|score| + |bias|) + kRouteFloor.
  void (*route_scores)(const float* logits, const float* bias, int64_t count, float* scores);
};

// ops::CompressorPool::Args as plain data.
struct PoolJob {
  int64_t ratio, width, first_position, num_tokens;
  const float *values, *gates, *ape;
  float* state;
  uint16_t* entries;
};

}  // namespace tessera::backends::cpu_common
