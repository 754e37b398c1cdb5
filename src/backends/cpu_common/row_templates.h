// SPDX-License-Identifier: Apache-2.0
#pragma once
// The functions of RowKernels on the lanes L of an instruction set (cpu_common/avx512_lanes.h, avx2/lanes.h). Included
// by kernel files only: all names are local to the file.
#include "backends/cpu_common/row_kernels.h"
#include "backends/cpu_common/vector_math.h"

namespace tessera::backends::cpu_common {

namespace {

// The 16 lanes in which sums of products are added.
template <class L>
struct Sixteen {
  static constexpr int kVecs = kRowStep / L::kLanes;
  typename L::Vec v[kVecs];

  static Sixteen zero() {
    Sixteen out;
    for (int i = 0; i < kVecs; ++i) out.v[i] = L::all(0);
    return out;
  }
  static Sixteen load(const float* from) {
    Sixteen out;
    for (int i = 0; i < kVecs; ++i) out.v[i] = L::load(from + i * L::kLanes);
    return out;
  }
  static Sixteen load(const uint16_t* from) {
    Sixteen out;
    for (int i = 0; i < kVecs; ++i) out.v[i] = L::load_bf16(from + i * L::kLanes);
    return out;
  }
  void add_product(const Sixteen& a, const Sixteen& b) {
    for (int i = 0; i < kVecs; ++i) v[i] = L::add(v[i], L::mul(a.v[i], b.v[i]));
  }
  float sum() const {
    float lanes[kRowStep];
    for (int i = 0; i < kVecs; ++i) L::store(lanes + i * L::kLanes, v[i]);
    for (int half = kRowStep / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0];
  }
};

template <class L>
void rms_norm_rows(const uint16_t* x, const void* weight, bool is_weight_f32, int64_t width, float eps,
                   int64_t num_rows, uint16_t* out) {
  for (int64_t row = 0; row < num_rows; ++row, x += width, out += width) {
    Sixteen<L> squares = Sixteen<L>::zero();
    for (int64_t c = 0; c < width; c += kRowStep) {
      const Sixteen<L> values = Sixteen<L>::load(x + c);
      squares.add_product(values, values);
    }
    const float mean = squares.sum() / static_cast<float>(width);
    const typename L::Vec factor = L::all(1 / __builtin_sqrtf(mean + eps));
    for (int64_t c = 0; c < width; c += L::kLanes) {
      typename L::Vec y = L::mul(L::load_bf16(x + c), factor);
      if (weight != nullptr) {
        y = L::mul(y, is_weight_f32 ? L::load(static_cast<const float*>(weight) + c)
                                    : L::load_bf16(static_cast<const uint16_t*>(weight) + c));
      }
      L::store_bf16(out + c, y);
    }
  }
}

// kTokens rows of x with kRows rows of fn.
template <class L, int kTokens, int kRows>
void mix_tile(const uint16_t* x, const float* fn, int64_t width, float* m, int64_t num_fn) {
  Sixteen<L> sums[kTokens][kRows];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
    for (int c = 0; c < kRows; ++c) sums[t][c] = Sixteen<L>::zero();
  }
  for (int64_t i = 0; i < width; i += kRowStep) {
    Sixteen<L> values[kTokens];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) values[t] = Sixteen<L>::load(x + t * width + i);
#pragma GCC unroll 8
    for (int c = 0; c < kRows; ++c) {
      const Sixteen<L> weights = Sixteen<L>::load(fn + c * width + i);
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) sums[t][c].add_product(weights, values[t]);
    }
  }
  for (int t = 0; t < kTokens; ++t) {
    for (int c = 0; c < kRows; ++c) m[t * num_fn + c] = sums[t][c].sum();
  }
}

template <class L, int kTokens>
void mix_tokens(const uint16_t* x, const float* fn, int64_t num_fn, int64_t width, float* squares, float* m) {
  constexpr int kRows = L::kLanes == 16 ? 4 : 2;
  int64_t c = 0;
  for (; c + kRows <= num_fn; c += kRows) mix_tile<L, kTokens, kRows>(x, fn + c * width, width, m + c, num_fn);
  for (; c < num_fn; ++c) mix_tile<L, kTokens, 1>(x, fn + c * width, width, m + c, num_fn);
  for (int t = 0; t < kTokens && squares != nullptr; ++t) {
    Sixteen<L> sum = Sixteen<L>::zero();
    for (int64_t i = 0; i < width; i += kRowStep) {
      const Sixteen<L> values = Sixteen<L>::load(x + t * width + i);
      sum.add_product(values, values);
    }
    squares[t] = sum.sum();
  }
}

template <class L>
void mix_rows(const uint16_t* x, int64_t num_tokens, const float* fn, int64_t num_fn, int64_t width, float* squares,
              float* m) {
  if (num_tokens == kMixTokens) {
    mix_tokens<L, kMixTokens>(x, fn, num_fn, width, squares, m);
    return;
  }
  for (int64_t t = 0; t < num_tokens; ++t)
    mix_tokens<L, 1>(x + t * width, fn, num_fn, width, squares == nullptr ? nullptr : squares + t, m + t * num_fn);
}

template <class L>
void mhc_read_row(const uint16_t* streams, const float* pre, int64_t hidden, uint16_t* y) {
  for (int64_t i = 0; i < hidden; i += L::kLanes) {
    typename L::Vec sum = L::all(0);
    for (int j = 0; j < kMixStreams; ++j)
      sum = L::add(sum, L::mul(L::all(pre[j]), L::load_bf16(streams + j * hidden + i)));
    L::store_bf16(y + i, sum);
  }
}

template <class L>
void mhc_write_row(const uint16_t* streams, const uint16_t* o, const float* post, const float* comb, int64_t hidden,
                   uint16_t* out) {
  for (int64_t i = 0; i < hidden; i += L::kLanes) {
    typename L::Vec x[kMixStreams];
    for (int j = 0; j < kMixStreams; ++j) x[j] = L::load_bf16(streams + j * hidden + i);
    const typename L::Vec written = L::load_bf16(o + i);
    for (int k = 0; k < kMixStreams; ++k) {
      typename L::Vec sum = L::all(0);
      for (int j = 0; j < kMixStreams; ++j) sum = L::add(sum, L::mul(L::all(comb[j * kMixStreams + k]), x[j]));
      L::store_bf16(out + k * hidden + i, L::add(L::mul(L::all(post[k]), written), sum));
    }
  }
}

template <class L>
void rotate_rows(uint16_t* x, const float* cosine, const float* sine, int64_t num_vectors, int64_t stride,
                 int64_t rope_dim) {
  for (int64_t v = 0; v < num_vectors; ++v, x += stride) {
    for (int64_t i = 0; i < rope_dim; i += L::kLanes) {
      const typename L::Vec values = L::load_bf16(x + i);
      const typename L::Vec others = L::template exchange<1>(values);
      L::store_bf16(x + i, L::add(L::mul(values, L::load(cosine + i)), L::mul(others, L::load(sine + i))));
    }
  }
}

template <class L>
void swiglu_rows(const uint16_t* gate, const uint16_t* up, float limit, int64_t count, uint16_t* out) {
  using Vec = typename L::Vec;
  const Vec high = L::all(limit > 0 ? limit : __builtin_huge_valf()), low = L::sub(L::all(0), high);
  for (int64_t i = 0; i < count; i += L::kLanes) {
    // The second operand is what a comparison with NaN gives.
    const Vec g = L::min(high, L::load_bf16(gate + i)), u = L::max(low, L::min(high, L::load_bf16(up + i)));
    const Vec one = L::all(1);
    L::store_bf16(out + i, L::mul(L::div(g, L::add(one, exponential<L>(L::sub(L::all(0), g)))), u));
  }
}

template <class L>
void add_all_rows(float start, const uint16_t* const* rows, int64_t num_rows, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; i += L::kLanes) {
    typename L::Vec sum = L::all(start);
    for (int64_t r = 0; r < num_rows; ++r) sum = L::add(sum, L::load_bf16(rows[r] + i));
    L::store_bf16(out + i, sum);
  }
}

// Butterflies between lanes `kStep` apart: a + b below, a - b above.
template <class L, int kStep>
void exchange_in_vectors(float* x, int64_t width) {
  alignas(64) float signs[L::kLanes];
  for (int i = 0; i < L::kLanes; ++i) signs[i] = (i & kStep) == 0 ? 1.0f : -1.0f;
  const typename L::Vec sign = L::load(signs);
  for (int64_t i = 0; i < width; i += L::kLanes) {
    const typename L::Vec values = L::load(x + i);
    L::store(x + i, L::add(L::template exchange<kStep>(values), L::mul(values, sign)));
  }
}

template <class L>
float largest_magnitude(const float* x, int64_t count) {
  alignas(64) float lanes[L::kLanes];
  typename L::Vec most = L::all(0), check = L::all(0);
  for (int64_t i = 0; i < count; i += L::kLanes) {
    const typename L::Vec values = L::abs(L::load(x + i));
    most = L::max(values, most);
    check = L::add(check, L::sub(values, values));  // NaN where a value is not finite
  }
  L::store(lanes, L::add(most, check));
  float result = lanes[0];
  for (int i = 1; i < L::kLanes; ++i) result = lanes[i] > result || lanes[i] != lanes[i] ? lanes[i] : result;
  for (int i = 0; i < L::kLanes; ++i) result = lanes[i] != lanes[i] ? lanes[i] : result;
  return result;
}

// Through E2M1 by 32 with power-of-two scales and back (numeric/mxfp4.h). Adding 1.5 * 2^23 steps rounds to a step.
template <class L>
void round_to_fp4(float* x, int64_t width) {
  using Vec = typename L::Vec;
  constexpr int64_t kBlock = 32;
  constexpr float kFloor = 6 * 0x1p-126f, kShift = 12582912.0f;
  for (int64_t block = 0; block < width; block += kBlock) {
    const float most = largest_magnitude<L>(x + block, kBlock);
    const float scale =
        power_of_code(most != most ? uint8_t{255} : power_code_above((most > kFloor ? most : kFloor) * (1.0f / 6.0f)));
    for (int64_t i = block; i < block + kBlock; i += L::kLanes) {
      const Vec value = L::div(L::load(x + i), L::all(scale)), magnitude = L::abs(value);
      const Vec shift = L::where_less(magnitude, L::all(2), L::all(kShift / 2),
                                      L::where_less(magnitude, L::all(4), L::all(kShift), L::all(kShift * 2)));
      const Vec rounded = L::min(L::all(6), L::sub(L::add(magnitude, shift), shift));
      L::store(x + i, L::mul(L::with_sign_of(rounded, value), L::all(scale)));
    }
  }
}

template <class L>
void hadamard_rows(uint16_t* x, int64_t width, float factor, bool is_fp4, int64_t num_rows) {
  alignas(64) float row[512];
  for (int64_t r = 0; r < num_rows; ++r, x += width) {
    for (int64_t i = 0; i < width; i += L::kLanes) L::store(row + i, L::load_bf16(x + i));
    exchange_in_vectors<L, 1>(row, width);
    exchange_in_vectors<L, 2>(row, width);
    exchange_in_vectors<L, 4>(row, width);
    if constexpr (L::kLanes == 16) exchange_in_vectors<L, 8>(row, width);
    for (int64_t step = L::kLanes; step < width; step *= 2) {
      for (int64_t base = 0; base < width; base += 2 * step) {
        for (int64_t i = base; i < base + step; i += L::kLanes) {
          const typename L::Vec a = L::load(row + i), b = L::load(row + i + step);
          L::store(row + i, L::add(a, b));
          L::store(row + i + step, L::sub(a, b));
        }
      }
    }
    for (int64_t i = 0; i < width; i += L::kLanes)
      L::store(row + i, L::bf16_rounded(L::mul(L::load(row + i), L::all(factor))));
    if (is_fp4) round_to_fp4<L>(row, width);
    for (int64_t i = 0; i < width; i += L::kLanes) L::store_bf16(x + i, L::load(row + i));
  }
}

// As numeric::q8_quantize. Adding 1.5 * 2^23 of the steps of a value's binade rounds it to E4M3.
template <class L>
void encode_e4m3_row(const uint16_t* x, int64_t nope, uint8_t* codes, uint8_t* scales) {
  using Vec = typename L::Vec;
  constexpr int64_t kGroup = 64;
  alignas(64) float values[kGroup];
  for (int64_t begin = 0; begin < nope; begin += kGroup) {
    for (int64_t i = 0; i < kGroup; i += L::kLanes) L::store(values + i, L::load_bf16(x + begin + i));
    const float most = largest_magnitude<L>(values, kGroup);
    if (most != most) {
      scales[begin / kGroup] = 255;
      __builtin_memset(codes + begin, 0, kGroup);
      continue;
    }
    const uint8_t code = power_code_above((most > 1e-4f ? most : 1e-4f) * (1.0f / 448.0f));
    scales[begin / kGroup] = code;
    const Vec scale = L::all(power_of_code(code));
    for (int64_t i = 0; i < kGroup; i += L::kLanes) {
      const Vec value = L::div(L::load(values + i), scale), magnitude = L::abs(value);
      const Vec shift = L::template one_and_a_half_above<20>(magnitude, -6);
      const Vec rounded = L::min(L::all(448), L::sub(L::add(magnitude, shift), shift));
      L::store_e4m3(codes + begin + i, L::mul(L::with_sign_of(rounded, value), L::all(1.0f / 256)));
    }
  }
}

template <class L>
void pool_online_channels(const PoolJob& job, int64_t begin, int64_t end) {
  using Vec = typename L::Vec;
  const int64_t width = job.width;
  for (int64_t c = begin; c < end; c += L::kLanes) {
    float *max_at = job.state + c, *sum_at = max_at + width, *weighted_at = sum_at + width;
    Vec max = L::load(max_at), sum = L::load(sum_at), weighted = L::load(weighted_at);
    int64_t entry = 0, phase = job.first_position % job.ratio;
    for (int64_t i = 0; i < job.num_tokens; ++i) {
      const Vec value = L::load(job.values + i * width + c);
      const Vec score = L::add(L::load(job.gates + i * width + c), L::load(job.ape + phase * width + c));
      const Vec top = L::max(max, score);  // of two, one NaN: the score
      const Vec keep = exponential<L>(L::sub(max, top)), add = exponential<L>(L::sub(score, top));
      sum = L::add(L::mul(sum, keep), add);
      weighted = L::add(L::mul(weighted, keep), L::mul(add, value));
      max = top;
      if (++phase == job.ratio) {
        L::store_bf16(job.entries + entry++ * width + c, L::div(weighted, sum));
        max = L::all(-__builtin_huge_valf()), sum = L::all(0), weighted = L::all(0);
        phase = 0;
      }
    }
    L::store(max_at, max);
    L::store(sum_at, sum);
    L::store(weighted_at, weighted);
  }
}

template <class L>
void pool_overlap_channels(const PoolJob& job, int64_t begin, int64_t end) {
  using Vec = typename L::Vec;
  constexpr int64_t kRatio = 4;
  const int64_t width = job.width, row_width = 2 * width;
  // ops/compressor/compressor.cc: the previous window's first halves, the current window's rows.
  float *previous_values = job.state, *previous_scores = previous_values + kRatio * width;
  float *current_values = previous_scores + kRatio * width, *current_scores = current_values + kRatio * row_width;
  for (int64_t c = begin; c < end; c += L::kLanes) {
    int64_t entry = 0, phase = job.first_position % kRatio;
    for (int64_t i = 0; i < job.num_tokens; ++i) {
      for (int64_t half = 0; half < row_width; half += width) {
        const int64_t at = i * row_width + half + c, to = phase * row_width + half + c;
        L::store(current_values + to, L::load(job.values + at));
        L::store(current_scores + to, L::add(L::load(job.gates + at), L::load(job.ape + to)));
      }
      if (++phase < kRatio) continue;
      phase = 0;
      Vec scores[2 * kRatio], values[2 * kRatio], max = L::all(-__builtin_huge_valf());
      for (int64_t row = 0; row < kRatio; ++row) {
        const int64_t before = row * width + c, now = row * row_width + c;
        scores[row] = L::load(previous_scores + before);
        values[row] = L::load(previous_values + before);
        scores[kRatio + row] = L::load(current_scores + now + width);
        values[kRatio + row] = L::load(current_values + now + width);
        L::store(previous_scores + before, L::load(current_scores + now));
        L::store(previous_values + before, L::load(current_values + now));
      }
      for (const Vec& score : scores) max = L::max(score, max);  // a NaN reaches the sum
      Vec sum = L::all(0), weighted = L::all(0);
      for (int64_t row = 0; row < 2 * kRatio; ++row) {
        const Vec weight = exponential<L>(L::sub(scores[row], max));
        sum = L::add(sum, weight);
        weighted = L::add(weighted, L::mul(weight, values[row]));
      }
      L::store_bf16(job.entries + entry++ * width + c, L::div(weighted, sum));
    }
  }
}

template <class L>
float largest_of(const float* x, int64_t count) {
  alignas(64) float lanes[L::kLanes];
  typename L::Vec most = L::all(-__builtin_huge_valf());
  for (int64_t i = 0; i < count; i += L::kLanes) most = L::max(L::load(x + i), most);  // of two, one NaN: the most
  L::store(lanes, most);
  float result = lanes[0];
  for (int i = 1; i < L::kLanes; ++i) result = lanes[i] > result ? lanes[i] : result;
  return result;
}

// log(1 + y) = 2 atanh(y / (2 + y)) for y = e^-|x| <= 1: the series to the 13th power is within 2e-8 of it.
template <class L>
void route_scores_row(const float* logits, const float* bias, int64_t count, float* scores) {
  using Vec = typename L::Vec;
  for (int64_t i = 0; i < count; i += L::kLanes) {
    const Vec x = L::load(logits + i), y = exponential<L>(L::sub(L::all(0), L::abs(x)));
    const Vec z = L::div(y, L::add(y, L::all(2))), squared = L::mul(z, z);
    Vec series = L::all(2.0f / 13);
    for (int power = 11; power > 0; power -= 2)
      series = L::fma(series, squared, L::all(2.0f / static_cast<float>(power)));
    const Vec softplus = L::add(L::max(L::all(0), x), L::mul(series, z));  // NaN stays
    L::store(scores + i, L::add(L::sqrt(softplus), L::load(bias + i)));
  }
}

// What a kernel file defines its table with.
template <class L>
constexpr RowKernels row_kernels() {
  return {rms_norm_rows<L>,         mix_rows<L>,     mhc_read_row<L>,    mhc_write_row<L>,   rotate_rows<L>,
          swiglu_rows<L>,           add_all_rows<L>, hadamard_rows<L>,   encode_e4m3_row<L>, pool_online_channels<L>,
          pool_overlap_channels<L>, largest_of<L>,   route_scores_row<L>};
}

}  // namespace

}  // namespace tessera::backends::cpu_common
