// SPDX-License-Identifier: Apache-2.0
// Panel sums by FP32 multiply-adds on 2 x 8 rows: even input, then odd.
#include <immintrin.h>

#include "backends/avx2/kernels.h"
#include "backends/cpu_common/epilogue.h"
#include "backends/cpu_common/panel_kernel.h"
#include "numeric/e2m1.h"

namespace tessera::backends::avx2 {

namespace {

struct alignas(32) Magnitudes {
  float value[8];
};
constexpr Magnitudes kE2m1 = [] {
  Magnitudes table{};
  for (int i = 0; i < 8; ++i) table.value[i] = numeric::e2m1_to_float(static_cast<uint8_t>(i));
  return table;
}();

struct Sixteen {
  __m256 low, high;  // rows 0 to 7, 8 to 15
};

struct MultiplyAdds {
  using Sum = Sixteen;
  struct Pairs {
    Sixteen even, odd;
  };
  struct Input {
    __m256 even, odd;
  };
  static constexpr int kInputBytes = 4, kPairBytes = 128, kInline = 2, kTile = 3, kPanels = 1;
  static Sum zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Sum load(const float* from) { return {_mm256_load_ps(from), _mm256_load_ps(from + 8)}; }
  static void store(float* to, Sum value) {
    _mm256_store_ps(to, value.low);
    _mm256_store_ps(to + 8, value.high);
  }
  static Pairs load_pairs(const uint8_t* from) {
    const float* values = reinterpret_cast<const float*>(from);
    return {load(values), load(values + 16)};
  }
  static void store_pairs(uint8_t* to, Pairs value) {
    float* values = reinterpret_cast<float*>(to);
    store(values, value.even);
    store(values + 16, value.odd);
  }
  static Sum multiply_add(Sum a, Sum b, Sum c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  static Sum all(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  static Input input(const char* x) {
    float pair[2];
    __builtin_memcpy(pair, x, sizeof pair);
    return {_mm256_set1_ps(pair[0]), _mm256_set1_ps(pair[1])};
  }
  static Sum dot(Sum sum, Pairs w, Input x) {
    const Sum even = {_mm256_fmadd_ps(w.even.low, x.even, sum.low), _mm256_fmadd_ps(w.even.high, x.even, sum.high)};
    return {_mm256_fmadd_ps(w.odd.low, x.odd, even.low), _mm256_fmadd_ps(w.odd.high, x.odd, even.high)};
  }
};

using Sum = MultiplyAdds::Sum;
using Pairs = MultiplyAdds::Pairs;

inline void prefetch_ahead(const uint8_t* block, int bytes) {
  for (int line = 0; line < bytes; line += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(block) + 2048 + line, _MM_HINT_T0);
  }
}

inline __m256i load_codes(const uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

// The code in the nibble that starts at bit `shift` of each 32-bit lane.
inline __m256 e2m1(__m256i codes, int shift) {
  const __m256 magnitude = _mm256_permutevar8x32_ps(_mm256_load_ps(kE2m1.value), _mm256_srli_epi32(codes, shift));
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(codes, 28 - shift), _mm256_set1_epi32(INT32_MIN));
  return _mm256_or_ps(magnitude, _mm256_castsi256_ps(sign));
}

// The E4M3 code in the top byte of each lane. Placed in FP32's exponent with E4M3's bias, then 2^120 puts that right;
// subnormals are exact too.
inline __m256 e4m3(__m256i codes) {
  const __m256i sign = _mm256_and_si256(codes, _mm256_set1_epi32(INT32_MIN));
  const __m256i magnitude = _mm256_srli_epi32(_mm256_andnot_si256(sign, codes), 4);
  const __m256i kept = _mm256_and_si256(magnitude, _mm256_set1_epi32(0x07F00000));
  return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_or_si256(sign, kept)), _mm256_set1_ps(0x1p120f));
}

inline __m256 low_half(__m256i words) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}
inline __m256 high_half(__m256i words) {
  return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xFFFF0000))));
}

template <int T>
void add_scaled(Sum* total, const Sum* part, Sum scale) {
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) total[t] = MultiplyAdds::multiply_add(part[t], scale, total[t]);
}

struct Nvfp4 {
  using I = MultiplyAdds;
  static constexpr int kGroup = 16, kBlockBytes = 128;
  static void prefetch(const uint8_t* block) { prefetch_ahead(block, kBlockBytes); }
  static Pairs pair(const uint8_t* block, int i) {
    const __m256i low = load_codes(block + i / 4 * 64), high = load_codes(block + i / 4 * 64 + 32);
    const int even = i % 4 * 4, odd = even + 16;
    return {{e2m1(low, even), e2m1(high, even)}, {e2m1(low, odd), e2m1(high, odd)}};
  }
  template <int T>
  static void add(Sum* total, const Sum* part, const cpu_common::Panel& panel, int64_t group) {
    // E4M3 shifted into FP16 is the value / 256.
    const __m128i codes = _mm_loadu_si128(static_cast<const __m128i*>(panel.scales) + group * panel.stride);
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 7);
    add_scaled<T>(
        total, part,
        {_mm256_cvtph_ps(_mm256_castsi256_si128(words)), _mm256_cvtph_ps(_mm256_extracti128_si256(words, 1))});
  }
};

struct Fp8 {
  using I = MultiplyAdds;
  static constexpr int kGroup = 128, kBlockBytes = 256;
  static void prefetch(const uint8_t* block) { prefetch_ahead(block, kBlockBytes); }
  static Pairs pair(const uint8_t* block, int i) {
    // Words of two codes, spread to the dwords of their rows.
    const auto words = [&](int half) {
      const __m256i codes = load_codes(block + i / 2 * 64 + half * 32), zero = _mm256_setzero_si256();
      return i % 2 == 0 ? _mm256_unpacklo_epi8(zero, codes) : _mm256_unpackhi_epi8(zero, codes);
    };
    const __m256i low = words(0), high = words(1);
    return {{e4m3(_mm256_slli_epi32(low, 16)), e4m3(_mm256_slli_epi32(high, 16))}, {e4m3(low), e4m3(high)}};
  }
  template <int T>
  static void add(Sum* total, const Sum* part, const cpu_common::Panel& panel, int64_t group) {
    add_scaled<T>(total, part, MultiplyAdds::all(static_cast<const float*>(panel.scales)[group]));
  }
};

// Formats without scales add a group's sum as it is: a multiply-add by one is that addition.
struct Bf16 {
  using I = MultiplyAdds;
  static constexpr int kGroup = 128, kBlockBytes = 512;
  static void prefetch(const uint8_t* block) { prefetch_ahead(block, kBlockBytes); }
  static Pairs pair(const uint8_t* block, int i) {
    const __m256i low = load_codes(block + i * 64), high = load_codes(block + i * 64 + 32);
    return {{low_half(low), low_half(high)}, {high_half(low), high_half(high)}};
  }
  template <int T>
  static void add(Sum* total, const Sum* part, const cpu_common::Panel&, int64_t) {
    add_scaled<T>(total, part, MultiplyAdds::all(1));
  }
};

struct F32 {
  using I = MultiplyAdds;
  static constexpr int kGroup = 128, kBlockBytes = 1024;
  static void prefetch(const uint8_t* block) { prefetch_ahead(block, kBlockBytes); }
  static Pairs pair(const uint8_t* block, int i) { return MultiplyAdds::load_pairs(block + i * 128); }
  template <int T>
  static void add(Sum* total, const Sum* part, const cpu_common::Panel&, int64_t) {
    add_scaled<T>(total, part, MultiplyAdds::all(1));
  }
};

}  // namespace

void nvfp4_fma(const cpu_common::PanelJob& job) {
  cpu_common::panel_sums<Nvfp4>(job);
}
void fp8_fma(const cpu_common::PanelJob& job) {
  cpu_common::panel_sums<Fp8>(job);
}
void bf16_fma(const cpu_common::PanelJob& job) {
  cpu_common::panel_sums<Bf16>(job);
}
void f32_fma(const cpu_common::PanelJob& job) {
  cpu_common::panel_sums<F32>(job);
}

void store(const cpu_common::StoreJob& job) {
  cpu_common::store_panels(job);
}
void gate(const cpu_common::GateJob& job) {
  cpu_common::gate_panels(job);
}

}  // namespace tessera::backends::avx2
