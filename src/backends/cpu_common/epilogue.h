// SPDX-License-Identifier: Apache-2.0
#pragma once
// What follows the sums of panels, as plain loops over 16 lanes that the compiler makes vectors of. Included by kernel
// files only: all names are local to the file.
#include "backends/cpu_common/panel.h"

namespace tessera::backends::cpu_common {

namespace {

// Nearest even; NaN stays NaN (numeric/bf16.h).
inline uint32_t bf16_bits(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t rounded = bits + 0x7FFF + (bits >> 16 & 1);
  return ((bits & 0x7FFFFFFF) > 0x7F800000 ? bits | 0x400000 : rounded) >> 16;
}
inline float bf16_rounded(float value) {
  return __builtin_bit_cast(float, bf16_bits(value) << 16);
}

// Within 2 units in the last place over [-87, 88], which it clamps to; NaN stays. Cody-Waite reduction by ln 2 in two
// parts, Taylor to degree 7 on |r| <= ln 2 / 2.
inline float exponential(float x) {
  x = x > 88.0f ? 88.0f : x < -87.0f ? -87.0f : x;
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float shifted = x * 1.44269504f + kShift;
  const float n = shifted - kShift;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const uint32_t power = (__builtin_bit_cast(uint32_t, shifted) << 23) + 0x3F800000;
  return p * __builtin_bit_cast(float, power);
}

inline void store_words(uint16_t* out, const uint16_t* words, int64_t count) {
  if (count == kPanelRows) {
    __builtin_memcpy(out, words, 2 * kPanelRows);
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = words[i];
  }
}

// Fetches what a job writes of row t: rows are pages apart, where no hardware fetches ahead.
inline void fetch_row(const StoreJob& job, int64_t t) {
  const int64_t size = job.is_f32 ? 4 : 2, end = job.first_n + job.num_panels * kPanelRows;
  const int64_t row = (job.row_ids == nullptr ? t : job.row_ids[t]) * job.row_elements;
  const char* out = static_cast<const char*>(job.out) + (row + job.first_n) * size;
  const int64_t bytes = ((end < job.end_n ? end : job.end_n) - job.first_n) * size;
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(out + i, 1);
}

void store_panels(const StoreJob& job) {
  constexpr int64_t kAhead = 4;
  for (int64_t t = 0; t < job.num_rows; ++t) {
    const float factor = job.factors[t];
    const int64_t row = (job.row_ids == nullptr ? t : job.row_ids[t]) * job.row_elements;
    if (t + kAhead < job.num_rows) fetch_row(job, t + kAhead);
    for (int64_t p = 0; p < job.num_panels; ++p) {
      const float* sums = job.sums + (p * kSumRows + t) * kPanelRows;
      const int64_t n = job.first_n + p * kPanelRows;
      const int64_t count = job.end_n - n < kPanelRows ? job.end_n - n : kPanelRows;
      if (job.is_f32) {
        float* out = static_cast<float*>(job.out) + row + n;
        for (int64_t i = 0; i < count; ++i) out[i] = sums[i] * factor;
        continue;
      }
      uint16_t words[kPanelRows];
      for (int64_t i = 0; i < kPanelRows; ++i) words[i] = static_cast<uint16_t>(bf16_bits(sums[i] * factor));
      store_words(static_cast<uint16_t*>(job.out) + row + n, words, count);
    }
  }
}

void gate_panels(const GateJob& job) {
  const float limit = job.limit > 0 ? job.limit : __builtin_huge_valf();
  for (int64_t t = 0; t < job.num_rows; ++t) {
    const float gate_factor = job.gate_factors[t], up_factor = job.up_factors[t], routing = job.routing[t];
    for (int64_t p = 0; p < job.num_panels; ++p) {
      const int64_t at = (p * kSumRows + t) * kPanelRows, n = job.first_n + p * kPanelRows;
      uint16_t words[kPanelRows];
      for (int64_t i = 0; i < kPanelRows; ++i) {
        float gate = bf16_rounded(job.gates[at + i] * gate_factor), up = bf16_rounded(job.ups[at + i] * up_factor);
        // Written so that a NaN passes through.
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
        words[i] = static_cast<uint16_t>(bf16_bits(gate / (1 + exponential(-gate)) * up * routing));
      }
      store_words(job.h + t * job.row_elements + n, words, job.end_n - n < kPanelRows ? job.end_n - n : kPanelRows);
    }
  }
}

}  // namespace

}  // namespace tessera::backends::cpu_common
