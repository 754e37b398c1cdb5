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

// A part's softmax for up to 64 heads; `heads` of them, whole vectors, are a row.
template <class Math>
struct PartSoftmax {
  alignas(64) float logits[kAttentionKeys * kAttentionHeads];            // [key][head]
  alignas(64) uint32_t probabilities[kAttentionKeys * kAttentionHeads];  // [kPair keys][head]
  // The same as rows of tiles, [head][kPair keys].
  alignas(64) uint32_t rows[Math::kHasTiles ? kAttentionHeads * kAttentionKeys / 2 : 16];
  alignas(64) float max[kAttentionHeads], sum[kAttentionHeads];
};

template <class Math>
struct AttentionScratch {
  static constexpr int64_t kSteps = DecodedKeys<Math>::kSteps, kChunks = DecodedKeys<Math>::kChunks;
  alignas(64) uint32_t q[kChunks * kSteps * kAttentionHeads];  // [chunk][step][head]
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
  const int64_t index = job.selected == nullptr ? rank : job.selected[rank];
  if (job.entry_pages == nullptr) return job.entries + index * job.entry_bytes;
  const int64_t in_page = index & ((int64_t{1} << job.entry_shift) - 1);
  return job.entry_pages[index >> job.entry_shift] + job.entry_offset + in_page * job.entry_bytes;
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
void logits_of_vectors(const AttentionScratch<Math>& s, const DecodedKeys<Math>& decoded, int64_t begin, int64_t end,
                       int64_t head, float* logits) {
  constexpr int64_t kSteps = AttentionScratch<Math>::kSteps;
  for (int64_t chunk = 0; chunk < s.chunks; ++chunk) {
    const uint32_t* q = s.q + chunk * kSteps * s.heads + head;
    const uint32_t* keys = decoded.keys + chunk * kAttentionKeys * kSteps;
    constexpr int kNum = kVecs == Math::kHeadVecs ? Math::kKeys : 8;
    int64_t n = begin;
    for (; n + kNum <= end; n += kNum)
      add_logits<Math, kVecs, kNum>(s, q, keys + n * kSteps, logits + n * s.heads + head, chunk == 0);
    for (; n + 2 <= end; n += 2)
      add_logits<Math, kVecs, 2>(s, q, keys + n * kSteps, logits + n * s.heads + head, chunk == 0);
    if (n < end) add_logits<Math, kVecs, 1>(s, q, keys + n * kSteps, logits + n * s.heads + head, chunk == 0);
  }
}

// Probabilities of a part, its maximum and sum, for heads [begin, end) of rows of `heads`.
template <class Math>
void softmax(float scale, PartSoftmax<Math>& part, int64_t heads, int64_t begin, int64_t end, int64_t count) {
  using Vec = typename Math::Vec;
  for (int64_t h = begin; h < end; h += Math::kLanes) {
    Vec max = Math::all(kLowest), sum = Math::all(0);
    for (int64_t n = 0; n < count; ++n) {
      float* at = part.logits + n * heads + h;
      const Vec logit = Math::mul(Math::load(at), Math::all(scale));
      Math::store(at, logit);
      max = Math::max(logit, max);  // passes over a NaN, which reaches the sum below
    }
    for (int64_t n = 0; n < count; n += Math::kPair) {
      Vec p[2] = {Math::all(0), Math::all(0)};
      for (int64_t i = 0; i < Math::kPair && n + i < count; ++i) {
        p[i] = exponential<Math>(Math::sub(Math::load(part.logits + (n + i) * heads + h), max));
        sum = Math::add(sum, p[i]);
      }
      Math::store_units(part.probabilities + n / Math::kPair * heads + h, Math::pack(p[0], p[1]));
    }
    Math::store(part.max + h, max);
    Math::store(part.sum + h, sum);
  }
  if constexpr (Math::kHasTiles) {
    Math::rows_of_probabilities(part.probabilities, heads, begin, end, count, part.rows);
  }
}

// Joins the part's maxima and sums to those before.
template <class Math>
void join_sums(AttentionScratch<Math>& s, const PartSoftmax<Math>& part, float* max, float* sum) {
  for (int64_t h = 0; h < s.heads; h += Math::kLanes) {
    const JoinFactors<Math> f = join_factors<Math>(Math::load(max + h), Math::load(sum + h), Math::load(part.max + h),
                                                   Math::load(part.sum + h));
    Math::store(max + h, f.max);
    Math::store(sum + h, f.sum);
    Math::store(s.keep + h, f.keep);
    Math::store(s.add + h, f.add);
  }
}

// A part's output onto that of the parts before.
template <class Math>
inline void put_output(const AttentionScratch<Math>& s, int64_t h, float* at, typename Math::Vec part) {
  Math::store(at, Math::add(Math::mul(Math::load(at), Math::all(s.keep[h])), Math::mul(part, Math::all(s.add[h]))));
}

// p v for kRows heads and kDimVecs vectors of the width.
template <class Math, int kRows>
void add_values(const AttentionScratch<Math>& s, const uint32_t* probabilities, const uint32_t* values, int64_t steps,
                int64_t h, float* output, int64_t stride) {
  using Vec = typename Math::Vec;
  constexpr int kVecs = Math::kDimVecs;
  Vec sum[kRows][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) sum[r][v] = Math::all(0);
  }
  const uint32_t* p = probabilities + h;
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
      put_output<Math>(s, h + r, output + (h + r) * stride + v * Math::kLanes, sum[r][v]);
    }
  }
}

// Of keys [begin, end).
template <class Math>
void vector_logits(const AttentionScratch<Math>& s, const DecodedKeys<Math>& decoded, int64_t begin, int64_t end,
                   float* logits) {
  constexpr int64_t kTile = Math::kHeadVecs * Math::kLanes;
  int64_t h = 0;
  for (; h + kTile <= s.heads; h += kTile) logits_of_vectors<Math, Math::kHeadVecs>(s, decoded, begin, end, h, logits);
  for (; h + 2 * Math::kLanes <= s.heads; h += 2 * Math::kLanes)
    logits_of_vectors<Math, 2>(s, decoded, begin, end, h, logits);
  if (h < s.heads) logits_of_vectors<Math, 1>(s, decoded, begin, end, h, logits);
}

// Joins values [begin, end) of a part to output[head][stride], which is of value `begin` on.
template <class Math>
void add_part(const AttentionScratch<Math>& s, const PartSoftmax<Math>& part, const DecodedKeys<Math>& decoded,
              int64_t num_heads, int64_t count, int64_t begin, int64_t end, float* output, int64_t stride) {
  if constexpr (Math::kHasTiles) {
    Math::output(part.rows, s.heads, decoded.values, count, begin, end,
                 [&](int64_t h, int64_t at, typename Math::Vec sum) {
                   if (h < num_heads) put_output<Math>(s, h, output + h * stride + at - begin, sum);
                 });
  } else {
    const int64_t steps = (count + Math::kPair - 1) / Math::kPair;
    for (int64_t i = begin; i < end; i += Math::kDimVecs * Math::kLanes) {
      const uint32_t* values = (Math::kPair == 1 ? decoded.keys : decoded.values) +
                               i / kAttentionChunk * (kAttentionKeys / Math::kPair) * kAttentionChunk +
                               i % kAttentionChunk;
      float* to = output + i - begin;
      int64_t r = 0;
      for (; r + Math::kRows <= num_heads; r += Math::kRows)
        add_values<Math, Math::kRows>(s, part.probabilities, values, steps, r, to, stride);
      for (; r + 2 <= num_heads; r += 2) add_values<Math, 2>(s, part.probabilities, values, steps, r, to, stride);
      if (r < num_heads) add_values<Math, 1>(s, part.probabilities, values, steps, r, to, stride);
    }
  }
}

template <class Math>
int64_t whole_vectors(int64_t heads) {
  return (heads + Math::kLanes - 1) / Math::kLanes * Math::kLanes;
}

template <class Math>
void begin_heads(const AttentionJob& job, AttentionScratch<Math>& s) {
  s.chunks = job.width / kAttentionChunk;
  s.heads = whole_vectors<Math>(job.num_heads);
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

// What is behind the last part: values of up to 64 heads as rounded, output[head][stride] of value `begin` on.
template <class Math>
void end_heads(const AttentionJob& job, const float* max, const float* sum, const float* output, int64_t stride,
               int64_t begin, int64_t end) {
  for (int64_t h = 0; h < job.num_heads; ++h) {
    const Quotient<Math> quotient(max[h], sum[h], job.sink[h]);
    for (int64_t c = begin; c < end; c += Math::kLanes) {
      quotient.store(job.out + h * job.width + c, Math::load(output + h * stride + c - begin));
    }
  }
}

template <class Math>
void attend(const AttentionJob& job) {
  [[maybe_unused]] const typename Math::Session session;
  alignas(64) DecodedKeys<Math> decoded;
  AttentionScratch<Math> s;
  PartSoftmax<Math> softmaxes;
  alignas(64) float output[kAttentionHeads * kAttentionWidth];
  alignas(64) float max[kAttentionHeads], sum[kAttentionHeads];
  begin_heads(job, s);
  pack_queries(job, s);
  for (int64_t h = 0; h < s.heads; ++h) max[h] = kLowest, sum[h] = 0;
  __builtin_memset(output, 0, static_cast<unsigned long>(job.num_heads * job.width) * 4);
  for (int side = 0; side < 2; ++side) {
    const bool is_window = side == 0;
    const int64_t keys = is_window ? job.window_count : job.num_entries;
    for (int64_t first = 0; first < keys; first += kAttentionKeys) {
      const int64_t left = keys - first, count = left < kAttentionKeys ? left : kAttentionKeys;
      constexpr int64_t kPadding = 2 * kAttentionStep;
      decode_part(job, {is_window, first, count}, 0, (count + kPadding - 1) / kPadding * kPadding, decoded);
      if constexpr (Math::kHasTiles) {
        Math::logits(s.q, s.heads, s.chunks, decoded.keys, count, softmaxes.logits);
      } else {
        vector_logits(s, decoded, 0, count, softmaxes.logits);
      }
      softmax(job.scale, softmaxes, s.heads, 0, s.heads, count);
      join_sums(s, softmaxes, max, sum);
      add_part(s, softmaxes, decoded, job.num_heads, count, 0, job.width, output, job.width);
    }
  }
  end_heads<Math>(job, max, sum, output, job.width, 0, job.width);
}

// Up to 64 heads of a job.
inline AttentionJob heads_from(const AttentionJob& job, int64_t head) {
  AttentionJob some = job;
  some.q += head * job.width, some.out += head * job.width, some.sink += head;
  some.num_heads = job.num_heads - head < kAttentionHeads ? job.num_heads - head : kAttentionHeads;
  return some;
}

template <class Math>
PartSoftmax<Math>& softmax_of(const AttentionPartState& part, int64_t head) {
  static_assert(sizeof(PartSoftmax<Math>) <= kAttentionSoftmaxBytes);
  char* all = static_cast<char*>(part.softmax) + head / kAttentionHeads * kAttentionSoftmaxBytes;
  return *reinterpret_cast<PartSoftmax<Math>*>(all);
}

template <class Math>
void step_logits(const AttentionJob& job, const AttentionPartState& part, int64_t begin) {
  static_assert(sizeof(DecodedKeys<Math>) <= kAttentionDecodedBytes);
  [[maybe_unused]] const typename Math::Session session;
  auto& decoded = *static_cast<DecodedKeys<Math>*>(part.decoded);
  decode_part(job, part.keys, begin, begin + kAttentionStep, decoded);
  const int64_t end = begin + kAttentionStep < part.keys.count ? begin + kAttentionStep : part.keys.count;
  if (begin >= end) return;
  for (int64_t head = 0; head < job.num_heads; head += kAttentionHeads) {
    const AttentionJob some = heads_from(job, head);
    float* logits = softmax_of<Math>(part, head).logits;
    if constexpr (Math::kHasTiles) {
      Math::logits_of_step(some.q, some.num_heads, some.width, decoded.keys + begin * DecodedKeys<Math>::kSteps,
                           logits + begin * whole_vectors<Math>(some.num_heads));
    } else {
      AttentionScratch<Math> s;
      begin_heads(some, s);
      pack_queries(some, s);
      vector_logits(s, decoded, begin, end, logits);
    }
  }
}

template <class Math>
void step_softmax(const AttentionJob& job, const AttentionPartState& part, int64_t head) {
  const int64_t group = head / kAttentionHeads * kAttentionHeads, begin = head - group;
  const int64_t heads = whole_vectors<Math>(heads_from(job, group).num_heads);
  const int64_t end = begin + kAttentionStep < heads ? begin + kAttentionStep : heads;
  softmax(job.scale, softmax_of<Math>(part, head), heads, begin, end, part.keys.count);
}

template <class Math>
void step_output(const AttentionJob& job, const AttentionPartState* parts, int64_t num_parts, int64_t head,
                 int64_t column, const AttentionSums* before, const AttentionSums* after) {
  constexpr int64_t kColumns = Math::kHasTiles ? kAttentionChunk / 2 : kAttentionChunk;
  constexpr unsigned long kRowBytes = kColumns * 4;
  [[maybe_unused]] const typename Math::Session session;
  const AttentionJob some = heads_from(job, head);
  AttentionScratch<Math> s;
  begin_heads(some, s);
  alignas(64) float output[kAttentionHeads * kColumns] = {};
  alignas(64) float max[kAttentionHeads], sum[kAttentionHeads];
  for (int64_t h = 0; h < s.heads; ++h) {
    const bool has = before != nullptr && h < some.num_heads;
    max[h] = has ? before->max[head + h] : kLowest;
    sum[h] = has ? before->sum[head + h] : 0;
    if (has) __builtin_memcpy(output + h * kColumns, before->output + (head + h) * job.width + column, kRowBytes);
  }
  for (int64_t i = 0; i < num_parts; ++i) {
    const PartSoftmax<Math>& part = softmax_of<Math>(parts[i], head);
    join_sums(s, part, max, sum);
    add_part(s, part, *static_cast<const DecodedKeys<Math>*>(parts[i].decoded), some.num_heads, parts[i].keys.count,
             column, column + kColumns, output, kColumns);
  }
  if (after == nullptr) return end_heads<Math>(some, max, sum, output, kColumns, column, column + kColumns);
  for (int64_t h = 0; h < some.num_heads; ++h) {
    __builtin_memcpy(after->output + (head + h) * job.width + column, output + h * kColumns, kRowBytes);
    if (column == 0) after->max[head + h] = max[h], after->sum[head + h] = sum[h];
  }
}

template <class Math>
constexpr AttentionKernels attention_kernels() {
  return {attend<Math>, step_logits<Math>, step_softmax<Math>, step_output<Math>,
          Math::kHasTiles ? kAttentionChunk / 2 : kAttentionChunk};
}

}  // namespace

}  // namespace tessera::backends::cpu_common
