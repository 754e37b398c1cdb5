// SPDX-License-Identifier: Apache-2.0
#pragma once
// One token's attention for up to 64 heads, as two products per part of 128 keys (docs/kernels/attention_cpu.md).
// Included by kernel files only: all names are local to the file. Math is the instruction set:
//   Vec, kLanes       FP32 lanes, and how many
//   Units, kPair      lanes of 4 bytes of operands: a pair of BF16 values (kPair 2) or one FP32 value (kPair 1)
//   dot(c, a, b)      c + the products of each lane's values, in one fixed order
//   decode_fp8, decode_bf16   64 stored values to units;  zip   two rows of 64 values to 64 units of both
//   kHeadVecs, kKeys, kDimVecs, kRows   register tiles: q k over heads x keys, p v over heads x widths
//   kHasTiles         whether the processor has tiles for the two products (amx/attention.cc says what Math then has)
//   Session           what a thread holds meanwhile
#include "backends/cpu_common/attention_job.h"
#include "backends/cpu_common/unit_products.h"
#include "backends/cpu_common/vector_math.h"

namespace tessera::backends::cpu_common {

namespace {

template <class Math>
struct DecodedKeys {
  static constexpr int64_t kSteps = kAttentionChunk / Math::kPair, kChunks = kAttentionWidth / kAttentionChunk;
  // [chunk][key][step]: a unit is the next kPair values of a key.
  alignas(64) uint32_t keys[kChunks * kAttentionKeys * kSteps];
  // [chunk][kPair keys][64]: a unit is the same value of kPair keys. With kPair 1 that is `keys`.
  alignas(64) uint32_t values[Math::kPair == 1 ? 1 : kChunks * kAttentionKeys / 2 * kAttentionChunk];
};

template <class Math>
struct AttentionScratch {
  static constexpr int64_t kSteps = DecodedKeys<Math>::kSteps, kChunks = DecodedKeys<Math>::kChunks;
  alignas(64) uint32_t q[kChunks * kSteps * kAttentionHeads];            // [chunk][step][head]
  alignas(64) float logits[kAttentionKeys * kAttentionHeads];            // [key][head]
  alignas(64) uint32_t probabilities[kAttentionKeys * kAttentionHeads];  // [kPair keys][head]
  // The same as rows of tiles, [head][kPair keys].
  alignas(64) uint32_t rows[Math::kHasTiles ? kAttentionHeads * kAttentionKeys / 2 : 1];
  alignas(64) float max[kAttentionHeads], sum[kAttentionHeads];  // of a part
  alignas(64) float keep[kAttentionHeads], add[kAttentionHeads];
  int64_t chunks, heads;  // of this job; heads: whole vectors
};

// The factors that join a part to those before it: of their output and of the part's. Without a finite logit the
// maximum stays at the lowest number, so that nothing is infinity minus infinity.
template <class Math>
struct JoinFactors {
  typename Math::Vec max, sum, keep, add;
};
constexpr float kLowest = -3.4028235e38f;

template <class Math>
inline JoinFactors<Math> join_factors(typename Math::Vec max_before, typename Math::Vec sum_before,
                                      typename Math::Vec max, typename Math::Vec sum) {
  const typename Math::Vec joined = Math::max(max, max_before);
  const typename Math::Vec keep = exponential<Math>(Math::sub(max_before, joined)),
                           add = exponential<Math>(Math::sub(max, joined));
  return {joined, Math::add(Math::mul(sum_before, keep), Math::mul(sum, add)), keep, add};
}

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
void decode_key(const AttentionJob& job, const uint8_t* entry, uint32_t* keys, int64_t n) {
  constexpr int64_t kSteps = DecodedKeys<Math>::kSteps;
  const int64_t chunks = job.width / kAttentionChunk, coded = job.nope / kAttentionChunk;
  const uint8_t* scales = entry + job.nope + 2 * (job.width - job.nope);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    uint32_t* to = keys + (chunk * kAttentionKeys + n) * kSteps;
    if (chunk < coded) {
      Math::decode_fp8(entry + chunk * kAttentionChunk, scales[chunk], to);
    } else {
      const uint8_t* from = entry + job.nope + 2 * (chunk - coded) * kAttentionChunk;
      Math::decode_bf16(reinterpret_cast<const uint16_t*>(from), to);
    }
  }
}

inline const uint8_t* entry_at(const AttentionJob& job, const AttentionPart& part, int64_t n) {
  const int64_t rank = part.first + n;
  if (part.is_window) return job.window_cache + (job.window_begin + rank) % job.window_slots * job.entry_bytes;
  return job.entry_cache + (job.selected == nullptr ? rank : job.selected[rank]) * job.entry_bytes;
}

// Keys [begin, end), and rows of pairs; behind the last key are zeros, which the last of an odd count is paired with.
template <class Math>
void decode_part(const AttentionJob& job, const AttentionPart& part, int64_t begin, int64_t end,
                 DecodedKeys<Math>& to) {
  constexpr int64_t kSteps = DecodedKeys<Math>::kSteps;
  const int64_t last = end < part.count ? end : part.count;
  for (int64_t n = begin; n < last; ++n) decode_key<Math>(job, entry_at(job, part, n), to.keys, n);
  if constexpr (Math::kPair == 2) {
    alignas(64) const uint32_t zeros[kSteps] = {};
    for (int64_t chunk = 0; chunk < job.width / kAttentionChunk; ++chunk) {
      const uint32_t* keys = to.keys + chunk * kAttentionKeys * kSteps;
      uint32_t* values = to.values + chunk * kAttentionKeys / 2 * kAttentionChunk;
      for (int64_t n = begin; n < end; n += 2) {
        Math::zip(n < last ? keys + n * kSteps : zeros, n + 1 < last ? keys + (n + 1) * kSteps : zeros,
                  values + n / 2 * kAttentionChunk);
      }
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
void logits_of_vectors(AttentionScratch<Math>& s, const DecodedKeys<Math>& decoded, int64_t count, int64_t head) {
  constexpr int64_t kSteps = AttentionScratch<Math>::kSteps;
  for (int64_t chunk = 0; chunk < s.chunks; ++chunk) {
    const uint32_t* q = s.q + chunk * kSteps * s.heads + head;
    const uint32_t* keys = decoded.keys + chunk * kAttentionKeys * kSteps;
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

// Probabilities of a part, its maximum and sum.
template <class Math>
void softmax(const AttentionJob& job, AttentionScratch<Math>& s, int64_t count) {
  using Vec = typename Math::Vec;
  for (int64_t h = 0; h < s.heads; h += Math::kLanes) {
    Vec max = Math::all(kLowest), sum = Math::all(0);
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
    Math::store(s.max + h, max);
    Math::store(s.sum + h, sum);
  }
}

// Joins the part's maxima and sums to those before.
template <class Math>
void join_sums(AttentionScratch<Math>& s, float* max, float* sum) {
  for (int64_t h = 0; h < s.heads; h += Math::kLanes) {
    const JoinFactors<Math> f =
        join_factors<Math>(Math::load(max + h), Math::load(sum + h), Math::load(s.max + h), Math::load(s.sum + h));
    Math::store(max + h, f.max);
    Math::store(sum + h, f.sum);
    Math::store(s.keep + h, f.keep);
    Math::store(s.add + h, f.add);
  }
}

// Where a part's output goes: onto that of the parts before, or alone.
template <class Math, bool kJoins>
inline void put_output(const AttentionScratch<Math>& s, int64_t h, float* at, typename Math::Vec part) {
  if constexpr (kJoins) {
    part = Math::add(Math::mul(Math::load(at), Math::all(s.keep[h])), Math::mul(part, Math::all(s.add[h])));
  }
  Math::store(at, part);
}

// p v for kRows heads and kDimVecs vectors of the width.
template <class Math, int kRows, bool kJoins>
void add_values(const AttentionScratch<Math>& s, const uint32_t* values, int64_t steps, int64_t h, float* output,
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
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      put_output<Math, kJoins>(s, h + r, output + (h + r) * stride + v * Math::kLanes, sum[r][v]);
    }
  }
}

template <class Math>
void part_logits(AttentionScratch<Math>& s, const DecodedKeys<Math>& decoded, int64_t count) {
  if constexpr (Math::kHasTiles) {
    Math::logits(s.q, s.heads, s.chunks, decoded.keys, count, s.logits);
  } else {
    constexpr int64_t kTile = Math::kHeadVecs * Math::kLanes;
    int64_t h = 0;
    for (; h + kTile <= s.heads; h += kTile) logits_of_vectors<Math, Math::kHeadVecs>(s, decoded, count, h);
    for (; h + 2 * Math::kLanes <= s.heads; h += 2 * Math::kLanes) logits_of_vectors<Math, 2>(s, decoded, count, h);
    if (h < s.heads) logits_of_vectors<Math, 1>(s, decoded, count, h);
  }
}

// Of the part whose probabilities are in `s`: [heads][width].
template <class Math, bool kJoins>
void part_output(const AttentionJob& job, AttentionScratch<Math>& s, const DecodedKeys<Math>& decoded, int64_t count,
                 float* to) {
  if constexpr (Math::kHasTiles) {
    const int64_t steps = Math::rows_of_probabilities(s.probabilities, s.heads, count, s.rows);
    Math::output(s.rows, s.heads, decoded.values, steps, s.chunks, [&](int64_t h, int64_t at, typename Math::Vec sum) {
      if (h < job.num_heads) put_output<Math, kJoins>(s, h, to + h * job.width + at, sum);
    });
  } else {
    const int64_t steps = (count + Math::kPair - 1) / Math::kPair;
    for (int64_t chunk = 0; chunk < s.chunks; ++chunk) {
      const uint32_t* values =
          (Math::kPair == 1 ? decoded.keys : decoded.values) + chunk * (kAttentionKeys / Math::kPair) * kAttentionChunk;
      for (int64_t i = 0; i < kAttentionChunk; i += Math::kDimVecs * Math::kLanes) {
        float* output = to + chunk * kAttentionChunk + i;
        int64_t r = 0;
        for (; r + Math::kRows <= job.num_heads; r += Math::kRows)
          add_values<Math, Math::kRows, kJoins>(s, values + i, steps, r, output, job.width);
        for (; r + 2 <= job.num_heads; r += 2) add_values<Math, 2, kJoins>(s, values + i, steps, r, output, job.width);
        if (r < job.num_heads) add_values<Math, 1, kJoins>(s, values + i, steps, r, output, job.width);
      }
    }
  }
}

template <class Math>
void begin_heads(const AttentionJob& job, AttentionScratch<Math>& s) {
  s.chunks = job.width / kAttentionChunk;
  s.heads = (job.num_heads + Math::kLanes - 1) / Math::kLanes * Math::kLanes;
  pack_queries(job, s);
}

// The sink: one more term of the denominator, without a value.
template <class Math>
struct Quotient {
  typename Math::Vec keep, sum;
  Quotient(float max, float sum_before, float sink_logit) {
    const auto before = Math::all(max), sink = Math::all(sink_logit), joined = Math::max(sink, before);
    keep = exponential<Math>(Math::sub(before, joined));
    sum = Math::add(Math::mul(Math::all(sum_before), keep), exponential<Math>(Math::sub(sink, joined)));
  }
  void store(uint16_t* out, typename Math::Vec output) const {
    Math::store_bf16(out, Math::div(Math::mul(output, keep), sum));
  }
};

template <class Math>
void attend(const AttentionJob& job) {
  [[maybe_unused]] const typename Math::Session session;
  alignas(64) DecodedKeys<Math> decoded;
  AttentionScratch<Math> s;
  alignas(64) float output[kAttentionHeads * kAttentionWidth];
  alignas(64) float max[kAttentionHeads], sum[kAttentionHeads];
  begin_heads(job, s);
  for (int64_t h = 0; h < s.heads; ++h) max[h] = kLowest, sum[h] = 0;
  __builtin_memset(output, 0, static_cast<unsigned long>(job.num_heads * job.width) * 4);
  for (int side = 0; side < 2; ++side) {
    const bool is_window = side == 0;
    const int64_t keys = is_window ? job.window_count : job.num_entries;
    for (int64_t first = 0; first < keys; first += kAttentionKeys) {
      const int64_t left = keys - first, count = left < kAttentionKeys ? left : kAttentionKeys;
      constexpr int64_t kPadding = 2 * kAttentionStep;
      decode_part(job, {is_window, first, count}, 0, (count + kPadding - 1) / kPadding * kPadding, decoded);
      part_logits(s, decoded, count);
      softmax(job, s, count);
      join_sums(s, max, sum);
      part_output<Math, true>(job, s, decoded, count, output);
    }
  }
  for (int64_t h = 0; h < job.num_heads; ++h) {
    const Quotient<Math> quotient(max[h], sum[h], job.sink[h]);
    for (int64_t c = h * job.width; c < (h + 1) * job.width; c += Math::kLanes) {
      quotient.store(job.out + c, Math::load(output + c));
    }
  }
}

template <class Math>
void decode_keys(const AttentionJob& job, const AttentionPart& part, int64_t begin, int64_t end, void* decoded) {
  static_assert(sizeof(DecodedKeys<Math>) <= kAttentionDecodedBytes);
  decode_part(job, part, begin, end, *static_cast<DecodedKeys<Math>*>(decoded));
}

template <class Math>
void part_sums(const AttentionJob& job, int64_t count, const void* decoded, const AttentionSums& sums) {
  [[maybe_unused]] const typename Math::Session session;
  const auto& keys = *static_cast<const DecodedKeys<Math>*>(decoded);
  AttentionScratch<Math> s;
  begin_heads(job, s);
  part_logits(s, keys, count);
  softmax(job, s, count);
  part_output<Math, false>(job, s, keys, count, sums.output);
  for (int64_t h = 0; h < job.num_heads; ++h) sums.max[h] = s.max[h], sums.sum[h] = s.sum[h];
}

template <class Math>
void join_parts(const AttentionJob& job, const AttentionSums* parts, int64_t num_parts, const AttentionSums& before,
                bool is_first, bool is_last) {
  using Vec = typename Math::Vec;
  Vec keep[kAttentionJoined], add[kAttentionJoined];
  Vec max = Math::all(is_first ? kLowest : *before.max), sum = Math::all(is_first ? 0 : *before.sum);
  for (int64_t i = 0; i < num_parts; ++i) {
    const JoinFactors<Math> f = join_factors<Math>(max, sum, Math::all(*parts[i].max), Math::all(*parts[i].sum));
    max = f.max, sum = f.sum, keep[i] = f.keep, add[i] = f.add;
  }
  alignas(64) float lanes[2][Math::kLanes];
  Math::store(lanes[0], max);
  Math::store(lanes[1], sum);
  *before.max = lanes[0][0], *before.sum = lanes[1][0];
  const Quotient<Math> quotient(lanes[0][0], lanes[1][0], *job.sink);
  for (int64_t c = 0; c < job.width; c += Math::kLanes) {
    Vec output = is_first ? Math::all(0) : Math::load(before.output + c);
    for (int64_t i = 0; i < num_parts; ++i) {
      output = Math::add(Math::mul(output, keep[i]), Math::mul(Math::load(parts[i].output + c), add[i]));
    }
    is_last ? quotient.store(job.out + c, output) : Math::store(before.output + c, output);
  }
}

template <class Math>
constexpr AttentionKernels attention_kernels() {
  return {attend<Math>, decode_keys<Math>, part_sums<Math>, join_parts<Math>};
}

}  // namespace

}  // namespace tessera::backends::cpu_common
