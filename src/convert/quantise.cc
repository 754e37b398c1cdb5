// SPDX-License-Identifier: Apache-2.0
#include "convert/quantise.h"

#include <bit>
#include <cstring>
#include <limits>

#include "numeric/e8m0.h"

namespace tessera::convert {

namespace {

using numeric::kE2m1Max;
using numeric::kNvfp4Block;
using numeric::Nvfp4WeightRule;

constexpr int kBlock = kNvfp4Block;
constexpr int64_t kE8m0Stride = 4;  // blocks; the comparison costs as much as all the rest
constexpr int kLanes = 4;           // partial sums, so that additions don't wait for each other
constexpr int32_t kMagnitudeBits = 0x7FFFFFFF, kInfinityBits = 0x7F800000;
constexpr int32_t kOneBits = std::bit_cast<int32_t>(1.0f), kSixBits = std::bit_cast<int32_t>(6.0f),
                  kEightBits = std::bit_cast<int32_t>(8.0f);

int32_t bits_of(float value) {
  return std::bit_cast<int32_t>(value);
}

float float_of(int32_t bits) {
  return std::bit_cast<float>(bits);
}

// Magnitudes of a block, each divided by `step` > 0 and rounded to E2M1: nearest, ties to even, at most 6. Adding and
// taking off 1.5 * 2^22 rounds to multiples of 1/2, and from each power of two above 1 on to twice as much, which is
// E2M1's spacing. Bounds are taken on the bits, as signed integers: for floats that are not negative the order is the
// same, and the compiler need not mind comparisons that trap.
void round_block(const float* magnitudes, float step, float* rounded) {
  float out[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    const int32_t bits = bits_of(magnitudes[i] / step);
    const int32_t bounded = bits < kEightBits ? bits : kEightBits;
    const int32_t power = bounded & kInfinityBits;
    const float shift = float_of((power > kOneBits ? power : kOneBits) + (22 << 23)) * 1.5f;
    const int32_t value = bits_of((float_of(bounded) + shift) - shift);
    out[i] = float_of(value < kSixBits ? value : kSixBits);
  }
  std::memcpy(rounded, out, sizeof(out));
}

// E2M1 codes of rounded magnitudes with the signs of `x`; returns whether a code is not zero.
bool pack_block(const float* x, const float* rounded, uint8_t* codes) {
  int32_t code[kBlock];
  int32_t any = 0;
  for (int i = 0; i < kBlock; ++i) {
    // From 1 on, exponent and mantissa bit count the codes up from 2; 1/2 and 0 lie below.
    const int32_t upper = (bits_of(rounded[i]) >> 22) - 252;
    const int32_t magnitude = (upper > 0 ? upper : 0) + (rounded[i] == 0.5f ? 1 : 0);
    any |= magnitude;
    code[i] = magnitude | (bits_of(x[i]) < 0 ? 8 : 0);
  }
  for (int i = 0; i < kBlock / 2; ++i) codes[i] = static_cast<uint8_t>(code[2 * i] | code[2 * i + 1] << 4);
  return any != 0;
}

double squared_error(const float* magnitudes, const float* rounded, float step) {
  double lanes[kLanes] = {};
  for (int i = 0; i < kBlock; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      const double difference = static_cast<double>(magnitudes[i + j]) - static_cast<double>(rounded[i + j] * step);
      lanes[j] += difference * difference;
    }
  }
  return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}

// In the order of numeric::nvfp4_quantize_weight_row, whose choice between two scales it must share.
double squared_error_in_order(const float* magnitudes, const float* rounded, float step) {
  double error = 0;
  for (int i = 0; i < kBlock; ++i) {
    const double difference = static_cast<double>(magnitudes[i]) - static_cast<double>(rounded[i] * step);
    error += difference * difference;
  }
  return error;
}

double squared_sum(const float* magnitudes) {
  double lanes[kLanes] = {};
  for (int i = 0; i < kBlock; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      lanes[j] += static_cast<double>(magnitudes[i + j]) * static_cast<double>(magnitudes[i + j]);
    }
  }
  return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}

// The block's magnitudes; returns the largest. All are finite.
float magnitudes_of(const float* x, float* magnitudes) {
  int32_t bits[kBlock];
  for (int i = 0; i < kBlock; ++i) bits[i] = bits_of(x[i]) & kMagnitudeBits;
  std::memcpy(magnitudes, bits, sizeof(bits));
  int32_t largest = 0;
  for (int i = 0; i < kBlock; ++i) largest = bits[i] > largest ? bits[i] : largest;
  return float_of(largest);
}

// A block's error under the power-of-two scale that UE8M0 would have given it. `value` is the block's squared sum.
void measure_e8m0(const float* magnitudes, float amax, double value, Statistics& measured) {
  const float step = numeric::e8m0_to_float(numeric::e8m0_from_float_up(amax / kE2m1Max));
  float rounded[kBlock];
  round_block(magnitudes, step, rounded);
  measured.squared_value_e8m0 += value;
  measured.squared_error_e8m0 += squared_error(magnitudes, rounded, step);
}

// Codes under a scale byte. A zero step gives zero codes without signs.
struct Encoded {
  float step = 0;
  float rounded[kBlock] = {};
  uint8_t codes[kBlock / 2] = {};
  bool is_zero = true;
};

void encode(const float* x, const float* magnitudes, uint8_t scale, float tensor_scale, Encoded& out) {
  out.step = numeric::kE4m3Values[scale] * tensor_scale;
  if (out.step == 0) {
    out = Encoded{};
    return;
  }
  round_block(magnitudes, out.step, out.rounded);
  out.is_zero = !pack_block(x, out.rounded, out.codes);
}

}  // namespace

float largest_magnitude(const float* x, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t bits = bits_of(x[i]) & kMagnitudeBits;
    largest = bits > largest ? bits : largest;
  }
  return largest >= kInfinityBits ? std::numeric_limits<float>::infinity() : float_of(largest);
}

void quantise_row(const float* x, int64_t count, float tensor_scale, Nvfp4WeightRule rule, uint8_t* codes,
                  uint8_t* scales, Statistics& measured) {
  Encoded six, four;
  for (int64_t block = 0; block < count / kBlock; ++block, x += kBlock) {
    float magnitudes[kBlock];
    const float amax = magnitudes_of(x, magnitudes);
    if (amax == 0) {  // byte 0, codes 0
      scales[block] = 0;
      std::memset(codes + block * (kBlock / 2), 0, kBlock / 2);
      ++measured.scales[0];
      ++measured.num_zero;
      continue;
    }
    uint8_t scale = numeric::e4m3_from_float(amax / (kE2m1Max * tensor_scale));
    encode(x, magnitudes, scale, tensor_scale, six);
    const Encoded* chosen = &six;
    if (rule == Nvfp4WeightRule::kFourOverSix) {
      const uint8_t to_four = numeric::e4m3_from_float(amax / (4 * tensor_scale));
      encode(x, magnitudes, to_four, tensor_scale, four);
      if (squared_error_in_order(magnitudes, four.rounded, four.step) <
          squared_error_in_order(magnitudes, six.rounded, six.step)) {
        scale = to_four;
        chosen = &four;
      }
    }
    scales[block] = scale;
    for (int i = 0; i < kBlock / 2; ++i) codes[block * (kBlock / 2) + i] = chosen->codes[i];
    ++measured.scales[scale];
    measured.num_saturated += amax / chosen->step > kE2m1Max && chosen->step > 0 ? 1 : 0;
    measured.num_zero += chosen->is_zero ? 1 : 0;
    measured.num_vanished += chosen->is_zero ? 1 : 0;
    const double value = squared_sum(magnitudes);
    measured.squared_value += value;
    measured.squared_error += squared_error(magnitudes, chosen->rounded, chosen->step);
    if (block % kE8m0Stride == 0) measure_e8m0(magnitudes, amax, value, measured);
  }
  measured.num_values += count;
  measured.num_rounded_blocks += count / kBlock;
  measured.num_blocks += count / kBlock;
}

void measure_row(const uint8_t* codes, const uint8_t* scales, int64_t count, float tensor_scale, bool measures_e8m0,
                 Statistics& measured) {
  for (int64_t block = 0; block < count / kBlock; ++block) {
    const uint8_t scale = scales[block] & 0x7F;
    const float step = numeric::kE4m3Values[scale] * tensor_scale;
    float values[kBlock], magnitudes[kBlock];
    for (int i = 0; i < kBlock / 2; ++i) {
      const numeric::E2m1Pair& pair = numeric::kE2m1Pairs[codes[block * (kBlock / 2) + i]];
      values[2 * i] = pair.low * step;
      values[2 * i + 1] = pair.high * step;
    }
    const float amax = magnitudes_of(values, magnitudes);
    ++measured.scales[scale];
    measured.num_zero += amax == 0 ? 1 : 0;
    if (measures_e8m0 && amax > 0 && block % kE8m0Stride == 0) {
      measure_e8m0(magnitudes, amax, squared_sum(magnitudes), measured);
    }
  }
  measured.num_values += count;
  measured.num_blocks += count / kBlock;
}

}  // namespace tessera::convert
