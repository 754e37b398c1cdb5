// SPDX-License-Identifier: Apache-2.0
// Caches: writing, compressing, scoring, selecting and attending entries.
#include <algorithm>
#include <cmath>
#include <string_view>

#include "ops/attention/attention.h"
#include "verify/cases.h"
#include "verify/fills.h"

namespace tessera::verify {

using ops::EntryFormat;
using ops::EntryLayout;

namespace {

constexpr EntryFormat kKvFormats[] = {EntryFormat::kBf16, EntryFormat::kF32, EntryFormat::kKvFp8Bf16,
                                      EntryFormat::kKvFp8F32};

bool is_f32(EntryFormat format) {
  return format == EntryFormat::kF32 || format == EntryFormat::kKvFp8F32;
}

DType activation_of(EntryFormat format) {
  return is_f32(format) ? DType::kF32 : DType::kBF16;
}

// How many of `most` entries each token sees: at least one token sees all.
std::vector<int32_t> visible_counts(Rng& rng, int64_t tokens, int64_t most) {
  std::vector<int32_t> counts = {static_cast<int32_t>(most)};
  while (static_cast<int64_t>(counts.size()) < tokens) {
    counts.push_back(static_cast<int32_t>(rng.below(static_cast<uint64_t>(most) + 1)));
  }
  return counts;
}

// Whether a call's entries lie in pages, as the model's do, or in one array, as the C interface's; published shapes are
// the model's.
template <class Op>
bool is_paged(Rng& rng, const Spec<Op>& spec) {
  return std::string_view(spec.label) != "small" || rng.below(2) == 0;
}

// Of the sizes that pages of tokens have at both ratios, and below.
int page_shift(Rng& rng) {
  return static_cast<int>(rng.below(8));
}

}  // namespace

std::vector<Spec<ops::CacheWrite>> specs_of(ops::CacheWrite, bool is_quick) {
  std::vector<Spec<ops::CacheWrite>> specs;
  for (const EntryFormat format : kKvFormats) {
    add_small<ops::CacheWrite>(specs, {.layout = {format, 192, 64}, .activation = activation_of(format)});
  }
  add_small<ops::CacheWrite>(specs, {.layout = {EntryFormat::kIndexFp4, 64, 0}});
  if (is_quick) return specs;
  for (const EntryFormat format : {EntryFormat::kBf16, EntryFormat::kKvFp8Bf16}) {
    add_published<ops::CacheWrite>(specs, {.layout = {format, 512, 64}}, "Flash, keys");
  }
  add_published<ops::CacheWrite>(specs, {.layout = {EntryFormat::kIndexFp4, 128, 0}}, "Flash, index keys");
  return specs;
}

std::vector<int64_t> random_slots(Rng& rng, int64_t rows) {
  const int64_t slots = rows + 2;
  std::vector<int64_t> order(static_cast<size_t>(slots));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  for (size_t i = 0; i < order.size(); ++i) std::swap(order[i], order[i + rng.below(order.size() - i)]);
  // The slot that lies last is written: of a cache no more is known than its slots say.
  const auto last = std::find(order.begin(), order.end(), slots - 1);
  std::swap(*last, order.front());
  if (rows > 2) order[1] = -1;
  return order;
}

Case<ops::CacheWrite> make_case(Rng& rng, const Spec<ops::CacheWrite>& spec) {
  const EntryLayout& layout = spec.desc.layout;
  const int64_t rows = spec.num_tokens, slots = rows + 2;
  Case<ops::CacheWrite> one;
  one.args.rows =
      one.arrays.tensor(filled(rng, spec.fill, rows, layout.width), spec.desc.activation, {rows, layout.width});
  one.args.slots = one.arrays.array(random_slots(rng, rows));
  // Untouched entries keep what they hold.
  std::vector<TensorView> written;
  if (is_paged(rng, spec)) {
    one.args.cache = one.arrays.paged_entries(rng, Fill::kNormal, layout, slots, rows, page_shift(rng), &written);
  } else {
    written.push_back(
        {one.arrays.entries(rng, Fill::kNormal, layout, slots), DType::kU8, {slots, layout.entry_bytes()}});
    one.args.cache = written[0].as<uint8_t>();
  }
  for (const TensorView& view : written) one.arrays.updates("cache", view, Rule::kBits);
  one.args.num_rows = rows;
  return one;
}

std::vector<Spec<ops::CompressorPool>> specs_of(ops::CompressorPool, bool is_quick) {
  std::vector<Spec<ops::CompressorPool>> specs;
  for (const int64_t ratio : {4, 128}) {
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      add_small<ops::CompressorPool>(specs, {.ratio = ratio, .width = 40, .activation = dtype}, 3 * ratio - 1);
    }
    if (is_quick) continue;
    const char* label = ratio == 4 ? "Flash, ratio 4" : "Flash, ratio 128";
    add_published<ops::CompressorPool>(specs, {.ratio = ratio, .width = 512}, label, 5 * ratio - 1);
    specs.push_back({{.ratio = ratio, .width = 512}, 2 * ratio + 3, Fill::kNormal, 0, label});
    if (ratio == 4) {
      add_published<ops::CompressorPool>(specs, {.ratio = 4, .width = 128}, "Flash, indexer", 5 * ratio - 2);
    }
  }
  return specs;
}

// `context` is the position of the first token of the first of two sequences.
ops::CompressorPool::Args pool_arrays(Rng& rng, const Spec<ops::CompressorPool>& spec, Arrays& arrays) {
  const ops::CompressorPool::Desc& desc = spec.desc;
  const int64_t width = desc.row_width(), tokens = spec.num_tokens + 2;
  ops::CompressorPool::Args args;
  args.values = arrays.array(filled(rng, spec.fill, tokens, width));
  args.gates = arrays.array(filled(rng, spec.fill, tokens, width));
  args.ape = arrays.array(normal_values(rng, desc.ratio, width));
  // The first sequence's state is somewhere in the middle of a text: any values, sums of weights being positive.
  std::vector<float> state = normal_values(rng, 1, desc.state_floats());
  if (spec.context == 0) ops::compressor_reset(desc, state.data());
  if (desc.ratio != 4 && spec.context != 0) {
    for (int64_t c = desc.width; c < 2 * desc.width; ++c) state[static_cast<size_t>(c)] = 1 + rng.uniform();
  }
  std::vector<float> second(state.size());
  ops::compressor_reset(desc, second.data());
  const Shape shape = {desc.state_floats()};
  const TensorView states[] = {arrays.tensor(state, DType::kF32, shape), arrays.tensor(second, DType::kF32, shape)};
  for (const TensorView& view : states) arrays.updates("state", view, Rule::kNorm);
  args.state = {arrays.array(std::vector<float*>{states[0].as<float>(), states[1].as<float>(), nullptr}), nullptr};
  const int32_t first_entry = static_cast<int32_t>(ops::most_completed(desc.ratio, spec.num_tokens));
  args.slices = arrays.array(std::vector<ops::CompressorSlice>{
      {.place = 0, .num_rows = static_cast<int32_t>(spec.num_tokens), .first_position = spec.context},
      {.place = 1,
       .first_row = static_cast<int32_t>(spec.num_tokens),
       .num_rows = 2,
       .first_entry = first_entry,
       .first_position = 0},
      {.place = 2, .num_rows = 0}});  // fills up: nobody's, no state
  args.num_slices = 3;
  args.entries = arrays.output("entries", desc.activation,
                               {first_entry + ops::most_completed(desc.ratio, 2), desc.width}, Rule::kValues);
  return args;
}

Case<ops::CompressorPool> make_case(Rng& rng, const Spec<ops::CompressorPool>& spec) {
  Case<ops::CompressorPool> one;
  one.args = pool_arrays(rng, spec, one.arrays);
  return one;
}

std::vector<Spec<ops::IndexScores>> specs_of(ops::IndexScores, bool is_quick) {
  std::vector<Spec<ops::IndexScores>> specs;
  for (const EntryFormat format : {EntryFormat::kIndexFp4, EntryFormat::kBf16, EntryFormat::kF32}) {
    add_small<ops::IndexScores>(
        specs, {.heads = 6, .width = 64, .keys = {format, 64, 0}, .activation = activation_of(format)}, 131);
  }
  if (is_quick) return specs;
  for (const EntryFormat format : {EntryFormat::kIndexFp4, EntryFormat::kBf16}) {
    add_published<ops::IndexScores>(specs, {.heads = 64, .width = 128, .keys = {format, 128, 0}}, "Flash", 1500);
  }
  return specs;
}

Case<ops::IndexScores> make_case(Rng& rng, const Spec<ops::IndexScores>& spec) {
  const ops::IndexScores::Desc& desc = spec.desc;
  const int64_t tokens = spec.num_tokens;
  Case<ops::IndexScores> one;
  one.args.queries = one.arrays.tensor(filled(rng, spec.fill, tokens * desc.heads, desc.width), desc.activation,
                                       {tokens, desc.heads, desc.width});
  one.args.weights =
      one.arrays.tensor(filled(rng, spec.fill, tokens, desc.heads), desc.activation, {tokens, desc.heads});
  if (is_paged(rng, spec)) {
    one.args.keys = one.arrays.paged_entries(rng, spec.fill, desc.keys, spec.context, tokens, page_shift(rng));
  } else {
    one.args.keys = one.arrays.entries(rng, spec.fill, desc.keys, spec.context);
  }
  one.args.counts = one.arrays.array(visible_counts(rng, tokens, spec.context));
  one.args.stride = spec.context + 5;
  // Scores behind a token's count stay as they were.
  one.args.scores = one.arrays.output<float>("scores", DType::kF32, {tokens, one.args.stride}, Rule::kNorm);
  one.args.num_tokens = tokens;
  return one;
}

std::vector<Spec<ops::TopK>> specs_of(ops::TopK, bool is_quick) {
  std::vector<Spec<ops::TopK>> specs;
  for (const int64_t k : {1, 12}) {
    for (const int64_t entries : {5, 200}) add_small<ops::TopK>(specs, {.k = k}, entries);
  }
  if (is_quick) return specs;
  for (const int64_t entries : {300, 513, 6000}) add_published<ops::TopK>(specs, {.k = 512}, "Flash", entries);
  return specs;
}

Case<ops::TopK> make_case(Rng& rng, const Spec<ops::TopK>& spec) {
  const int64_t tokens = spec.num_tokens;
  Case<ops::TopK> one;
  std::vector<float> scores = filled(rng, spec.fill, tokens, spec.context);
  for (float& score : scores) {
    const uint64_t kind = rng.below(40);
    if (kind < 15) score = std::round(score * 2);  // many ties
    if (kind == 20) score = std::nanf("");
  }
  one.args.scores = one.arrays.array(scores);
  one.args.stride = spec.context;
  one.args.counts = one.arrays.array(visible_counts(rng, tokens, spec.context));
  one.args.selected = one.arrays.output<int32_t>("selected", DType::kI32, {tokens, spec.desc.k}, Rule::kBits);
  one.args.num_tokens = tokens;
  return one;
}

namespace {

// The position, and above it the entries; negative: all of them are visible.
constexpr int64_t kEntryUnit = int64_t{1} << 24;

}  // namespace

int64_t attention_context(int64_t position, int64_t num_entries, bool is_selected) {
  const int64_t context = num_entries * kEntryUnit + position;
  return is_selected ? context : -context;
}

std::vector<Spec<ops::Attention>> specs_of(ops::Attention, bool is_quick) {
  std::vector<Spec<ops::Attention>> specs;
  for (const EntryFormat format : kKvFormats) {
    for (const int64_t window : {16, 130}) {
      const ops::Attention::Desc desc{.heads = 5,
                                      .head_dim = 192,
                                      .window = window,
                                      .scale = 1 / std::sqrt(192.0f),
                                      .layout = {format, 192, 64},
                                      .activation = activation_of(format)};
      add_small<ops::Attention>(specs, desc, attention_context(0, 0, false));      // one key and more
      add_small<ops::Attention>(specs, desc, attention_context(700, 129, true));   // over a part's edge
      add_small<ops::Attention>(specs, desc, attention_context(900, 257, false));  // the same, all visible
    }
  }
  if (is_quick) return specs;
  for (const EntryFormat format : {EntryFormat::kBf16, EntryFormat::kKvFp8Bf16}) {
    const ops::Attention::Desc desc{
        .heads = 64, .head_dim = 512, .window = 128, .scale = 1 / std::sqrt(512.0f), .layout = {format, 512, 64}};
    add_published<ops::Attention>(specs, desc, "Flash, window only", attention_context(1000, 0, false));
    add_published<ops::Attention>(specs, desc, "Flash, ratio 4: 128 + 512 keys", attention_context(6000, 1500, true));
    add_published<ops::Attention>(specs, desc, "Flash, ratio 128", attention_context(40000, 312, false));
  }
  return specs;
}

ops::Attention::Args attention_arrays(Rng& rng, const Spec<ops::Attention>& spec, Arrays& arrays) {
  constexpr int64_t kMostSelected = 512;
  const ops::Attention::Desc& desc = spec.desc;
  const int64_t tokens = spec.num_tokens, slots = desc.window + tokens + 2;
  const bool is_selected = spec.context > 0;
  const int64_t where = std::abs(spec.context), num_entries = where / kEntryUnit;
  // An FP32 score is off by 2^-24 of its terms, and its exponential by that share of itself: FP32 outputs are judged
  // on values of ordinary size, so that the bound is about the kernel.
  const bool is_mixed = spec.fill == Fill::kMixed, is_quiet = is_f32(desc.layout.format) && is_mixed;
  const Fill fill = is_quiet ? Fill::kNormal : spec.fill;
  ops::Attention::Args args;
  std::vector<float> q = filled(rng, fill, tokens * desc.heads, desc.head_dim);
  args.q = arrays.tensor(q, desc.activation, {tokens, desc.heads, desc.head_dim});
  std::vector<int64_t> positions;
  for (int64_t t = 0; t < tokens; ++t) positions.push_back(where % kEntryUnit + t);
  args.positions = arrays.array(positions);
  args.window_cache = arrays.entries(rng, fill, desc.layout, slots);
  args.window_slots = slots;
  args.sink = arrays.array(normal_values(rng, 1, desc.heads));
  std::vector<int32_t> counts(static_cast<size_t>(tokens)), selected;
  if (num_entries > 0) {
    if (is_paged(rng, spec)) {
      args.entry_cache = arrays.paged_entries(rng, fill, desc.layout, num_entries, tokens, page_shift(rng));
    } else {
      args.entry_cache = arrays.entries(rng, fill, desc.layout, num_entries);
    }
    const int64_t most = is_selected ? std::min(num_entries, kMostSelected) : num_entries;
    counts = visible_counts(rng, tokens, most);
    for (size_t t = 0; is_selected && t < counts.size(); ++t) {
      // `counts[t]` entries, ascending, each as likely as any other.
      int64_t left = counts[t];
      for (int64_t j = 0; j < num_entries && left > 0; ++j) {
        if (static_cast<int64_t>(rng.below(static_cast<uint64_t>(num_entries - j))) >= left) continue;
        selected.push_back(static_cast<int32_t>(j));
        --left;
      }
      selected.resize((t + 1) * static_cast<size_t>(most), -1);
    }
    args.selected_stride = most;
    if (is_selected) args.selected = arrays.array(selected);
  }
  args.num_entries = arrays.array(counts);
  // Probabilities are rounded to BF16 beside BF16 keys: one that falls the other way moves a head's values by up to
  // 2^-8 of the keys', whatever their sum is.
  const bool has_rounding = is_mixed || !is_f32(desc.layout.format);
  args.out = arrays.output("out", desc.activation, {tokens, desc.heads, desc.head_dim},
                           has_rounding ? Rule::kRows : Rule::kValues);
  args.num_tokens = tokens;
  return args;
}

Case<ops::Attention> make_case(Rng& rng, const Spec<ops::Attention>& spec) {
  Case<ops::Attention> one;
  one.args = attention_arrays(rng, spec, one.arrays);
  return one;
}

}  // namespace tessera::verify
