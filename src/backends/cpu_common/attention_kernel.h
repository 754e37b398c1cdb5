// SPDX-License-Identifier: Apache-2.0
#pragma once
// One token's attention for up to 64 heads, as two products per part of 128 keys (docs/kernels/attention_cpu.md).
// Included by kernel files only: all names are local to the file. Math is the instruction set:
//   Vec, kLanes       FP32 lanes, and how many
//   Units, kPair      lanes of 4 bytes of operands: a pair of BF16 values (kPair 2) or one FP32 value (kPair 1)
//   dot(c, a, b)      c + the products of each lane's values, in one fixed order
//   decode_fp8, decode_bf16   64 stored values to units;  zip   two rows of 64 values to 64 units of both
//   kHeadVecs, kKeys, kDimVecs, kRows   register tiles: q k over heads x keys, p v over heads x widths
#include "backends/cpu_common/attention_job.h"
#include "backends/cpu_common/unit_products.h"
#include "backends/cpu_common/vector_math.h"

namespace tessera::backends::cpu_common {

namespace {

template <class Math>
struct AttentionScratch {
  static constexpr int64_t kSteps = kAttentionChunk / Math::kPair, kChunks = kAttentionWidth / kAttentionChunk;
  // [chunk][key][step]: a unit is the next kPair values of a key.
  alignas(64) uint32_t keys[kChunks * kAttentionKeys * kSteps];
  // [chunk][kPair keys][64]: a unit is the same value of kPair keys. With kPair 1 that is `keys`.
  alignas(64) uint32_t values[Math::kPair == 1 ? 1 : kChunks * kAttentionKeys / 2 * kAttentionChunk];
  alignas(64) uint32_t q[kChunks * kSteps * kAttentionHeads];            // [chunk][step][head]
  alignas(64) float logits[kAttentionKeys * kAttentionHeads];            // [key][head]
  alignas(64) uint32_t probabilities[kAttentionKeys * kAttentionHeads];  // [kPair keys][head]
  alignas(64) float output[kAttentionHeads * kAttentionWidth];           // unnormalised [head][width]
  alignas(64) float max[kAttentionHeads], sum[kAttentionHeads];          // over the parts so far
  alignas(64) float keep[kAttentionHeads], add[kAttentionHeads];         // factors of the output so far, of this part
  int64_t chunks, heads;                                                 // of this job; heads: whole vectors
};

template <class Math>
void pack_queries(const AttentionJob& job, AttentionScratch<Math>& s) {
  constexpr int64_t kSteps = AttentionScratch<Math>::kSteps;
  for (int64_t chunk = 0; chunk < s.chunks; ++chunk) {
    uint32_t* to = s.q + chunk * kSteps * s.heads;
    for (int64_t h = 0; h < s.heads; ++h) {
      alignas(64) uint32_t units[kAttentionChunk] = {};
      if (h < job.num_heads) Math::decode_bf16(job.q + h * job.width + chunk * kAttentionChunk, units);
      for (int64_t step = 0; step < kSteps; ++step) to[step * s.heads + h] = units[step];
    }
  }
}

template <class Math>
void decode_key(const AttentionJob& job, const uint8_t* entry, AttentionScratch<Math>& s, int64_t n) {
  constexpr int64_t kSteps = AttentionScratch<Math>::kSteps;
  const int64_t coded = job.nope / kAttentionChunk;
  const uint8_t* scales = entry + job.nope + 2 * (job.width - job.nope);
  for (int64_t chunk = 0; chunk < s.chunks; ++chunk) {
    uint32_t* to = s.keys + (chunk * kAttentionKeys + n) * kSteps;
    if (chunk < coded) {
      Math::decode_fp8(entry + chunk * kAttentionChunk, scales[chunk], to);
    } else {
      const uint8_t* from = entry + job.nope + 2 * (chunk - coded) * kAttentionChunk;
      Math::decode_bf16(reinterpret_cast<const uint16_t*>(from), to);
    }
  }
}

// logits[first, first + kNum)[head_begin + vectors] += q k over one chunk.
template <class Math, int kVecs, int kNum>
void add_logits(const AttentionScratch<Math>& s, const uint32_t* q, const uint32_t* keys, float* logits,
                bool is_first_chunk) {
  using Vec = typename Math::Vec;
  Vec sum[kNum][kVecs];
#pragma GCC unroll 8
  for (int n = 0; n < kNum; ++n) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v)
      sum[n][v] = is_first_chunk ? Math::all(0) : Math::load(logits + n * s.heads + v * Math::kLanes);
  }
  add_unit_products<Math>(sum, q, s.heads, keys, AttentionScratch<Math>::kSteps);
#pragma GCC unroll 8
  for (int n = 0; n < kNum; ++n) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) Math::store(logits + n * s.heads + v * Math::kLanes, sum[n][v]);
  }
}

template <class Math, int kVecs>
void logits_of_vectors(AttentionScratch<Math>& s, int64_t count, int64_t head) {
  constexpr int64_t kSteps = AttentionScratch<Math>::kSteps;
  for (int64_t chunk = 0; chunk < s.chunks; ++chunk) {
    const uint32_t* q = s.q + chunk * kSteps * s.heads + head;
    const uint32_t* keys = s.keys + chunk * kAttentionKeys * kSteps;
    float* logits = s.logits + head;
    constexpr int kNum = kVecs == Math::kHeadVecs ? Math::kKeys : 8;
    int64_t n = 0;
    for (; n + kNum <= count; n += kNum)
      add_logits<Math, kVecs, kNum>(s, q, keys + n * kSteps, logits + n * s.heads, chunk == 0);
    for (; n + 2 <= count; n += 2)
      add_logits<Math, kVecs, 2>(s, q, keys + n * kSteps, logits + n * s.heads, chunk == 0);
    if (n < count) add_logits<Math, kVecs, 1>(s, q, keys + n * kSteps, logits + n * s.heads, chunk == 0);
  }
}

// Probabilities of a part, its maximum and sum, and with them the factors that join it to the parts before. Without a
// finite logit the maximum stays at the lowest number, so that nothing is infinity minus infinity.
template <class Math>
void softmax(const AttentionJob& job, AttentionScratch<Math>& s, int64_t count) {
  using Vec = typename Math::Vec;
  for (int64_t h = 0; h < s.heads; h += Math::kLanes) {
    Vec max = Math::all(-3.4028235e38f), sum = Math::all(0);
    for (int64_t n = 0; n < count; ++n) {
      float* at = s.logits + n * s.heads + h;
      const Vec logit = Math::mul(Math::load(at), Math::all(job.scale));
      Math::store(at, logit);
      max = Math::max(logit, max);  // passes over a NaN, which reaches the sum below
    }
    for (int64_t n = 0; n < count; n += Math::kPair) {
      Vec p[2] = {Math::all(0), Math::all(0)};
      for (int64_t i = 0; i < Math::kPair && n + i < count; ++i) {
        p[i] = exponential<Math>(Math::sub(Math::load(s.logits + (n + i) * s.heads + h), max));
        sum = Math::add(sum, p[i]);
      }
      Math::store_units(s.probabilities + n / Math::kPair * s.heads + h, Math::pack(p[0], p[1]));
    }
    const Vec before = Math::load(s.max + h), joined = Math::max(max, before);
    const Vec keep = exponential<Math>(Math::sub(before, joined)), add = exponential<Math>(Math::sub(max, joined));
    Math::store(s.keep + h, keep);
    Math::store(s.add + h, add);
    Math::store(s.max + h, joined);
    Math::store(s.sum + h, Math::add(Math::mul(Math::load(s.sum + h), keep), Math::mul(sum, add)));
  }
}

// output[h][..] = output * keep + (p v) * add for kRows heads and kDimVecs vectors of the width.
template <class Math, int kRows>
void add_values(AttentionScratch<Math>& s, const uint32_t* values, int64_t steps, int64_t h, float* output,
                int64_t stride) {
  using Vec = typename Math::Vec;
  constexpr int kVecs = Math::kDimVecs;
  Vec sum[kRows][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) sum[r][v] = Math::all(0);
  }
  const uint32_t* p = s.probabilities + h;
  for (int64_t step = 0; step < steps; ++step) {
    typename Math::Units row[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) row[v] = Math::load_units(values + step * kAttentionChunk + v * Math::kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const typename Math::Units probability = Math::all_units(p[step * s.heads + r]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) sum[r][v] = Math::dot(sum[r][v], row[v], probability);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const Vec keep = Math::all(s.keep[h + r]), add = Math::all(s.add[h + r]);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      float* at = output + (h + r) * stride + v * Math::kLanes;
      Math::store(at, Math::add(Math::mul(Math::load(at), keep), Math::mul(sum[r][v], add)));
    }
  }
}

template <class Math>
void attend_part(const AttentionJob& job, AttentionScratch<Math>& s, int64_t count) {
  constexpr int64_t kTile = Math::kHeadVecs * Math::kLanes;
  int64_t h = 0;
  for (; h + kTile <= s.heads; h += kTile) logits_of_vectors<Math, Math::kHeadVecs>(s, count, h);
  for (; h + 2 * Math::kLanes <= s.heads; h += 2 * Math::kLanes) logits_of_vectors<Math, 2>(s, count, h);
  if (h < s.heads) logits_of_vectors<Math, 1>(s, count, h);
  softmax(job, s, count);
  const int64_t steps = (count + Math::kPair - 1) / Math::kPair;
  for (int64_t chunk = 0; chunk < s.chunks; ++chunk) {
    const uint32_t* values =
        (Math::kPair == 1 ? s.keys : s.values) + chunk * (kAttentionKeys / Math::kPair) * kAttentionChunk;
    for (int64_t i = 0; i < kAttentionChunk; i += Math::kDimVecs * Math::kLanes) {
      float* output = s.output + chunk * kAttentionChunk + i;
      int64_t r = 0;
      for (; r + Math::kRows <= job.num_heads; r += Math::kRows)
        add_values<Math, Math::kRows>(s, values + i, steps, r, output, job.width);
      for (; r + 2 <= job.num_heads; r += 2) add_values<Math, 2>(s, values + i, steps, r, output, job.width);
      if (r < job.num_heads) add_values<Math, 1>(s, values + i, steps, r, output, job.width);
    }
  }
}

// The last key of an odd count is paired with zeros.
template <class Math>
void pair_values(AttentionScratch<Math>& s, int64_t count) {
  if constexpr (Math::kPair == 2) {
    constexpr int64_t kSteps = AttentionScratch<Math>::kSteps;
    alignas(64) const uint32_t zeros[kSteps] = {};
    for (int64_t chunk = 0; chunk < s.chunks; ++chunk) {
      const uint32_t* keys = s.keys + chunk * kAttentionKeys * kSteps;
      uint32_t* to = s.values + chunk * kAttentionKeys / 2 * kAttentionChunk;
      for (int64_t n = 0; n < count; n += 2)
        Math::zip(keys + n * kSteps, n + 1 < count ? keys + (n + 1) * kSteps : zeros, to + n / 2 * kAttentionChunk);
    }
  }
}

template <class Math>
void attend(const AttentionJob& job) {
  using Vec = typename Math::Vec;
  AttentionScratch<Math> s;
  s.chunks = job.width / kAttentionChunk;
  s.heads = (job.num_heads + Math::kLanes - 1) / Math::kLanes * Math::kLanes;
  pack_queries(job, s);
  for (int64_t h = 0; h < s.heads; ++h) s.max[h] = -3.4028235e38f, s.sum[h] = 0;
  __builtin_memset(s.output, 0, static_cast<unsigned long>(job.num_heads * job.width) * 4);
  for (int64_t first = 0; first < job.window_count; first += kAttentionKeys) {
    const int64_t left = job.window_count - first, count = left < kAttentionKeys ? left : kAttentionKeys;
    for (int64_t n = 0; n < count; ++n) {
      const int64_t slot = (job.window_begin + first + n) % job.window_slots;
      decode_key(job, job.window_cache + slot * job.entry_bytes, s, n);
    }
    pair_values(s, count);
    attend_part(job, s, count);
  }
  for (int64_t first = 0; first < job.num_entries; first += kAttentionKeys) {
    const int64_t left = job.num_entries - first, count = left < kAttentionKeys ? left : kAttentionKeys;
    for (int64_t n = 0; n < count; ++n) {
      const int64_t index = job.selected == nullptr ? first + n : job.selected[first + n];
      decode_key(job, job.entry_cache + index * job.entry_bytes, s, n);
    }
    pair_values(s, count);
    attend_part(job, s, count);
  }
  // The sink: one more term of the denominator, without a value.
  for (int64_t h = 0; h < job.num_heads; ++h) {
    const Vec before = Math::all(s.max[h]), sink = Math::all(job.sink[h]), joined = Math::max(sink, before);
    const Vec keep = exponential<Math>(Math::sub(before, joined));
    const Vec sum = Math::add(Math::mul(Math::all(s.sum[h]), keep), exponential<Math>(Math::sub(sink, joined)));
    for (int64_t c = 0; c < job.width; c += Math::kLanes) {
      Math::store_bf16(job.out + h * job.width + c,
                       Math::div(Math::mul(Math::load(s.output + h * job.width + c), keep), sum));
    }
  }
}

}  // namespace

}  // namespace tessera::backends::cpu_common
