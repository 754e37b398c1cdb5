// SPDX-License-Identifier: Apache-2.0
// Fused ops, at the shapes in which layers use them.
#include "verify/cases.h"
#include "verify/fills.h"

namespace tessera::verify {

using ops::EntryFormat;
using ops::InputMode;
using ops::WeightFormat;

namespace {

constexpr DType kActivations[] = {DType::kBF16, DType::kF32};

using Set = ops::NormRope::SetDesc;

// Queries, window, entries, index keys and index queries of a layer: as many of these, in this order.
ops::NormRope::Desc vectors_of_layer(int64_t heads, int64_t head_dim, int64_t rope_dim, int64_t index_dim,
                                     ops::EntryLayout kv, DType dtype, size_t num_sets) {
  const ops::EntryLayout key{dtype == DType::kF32 ? EntryFormat::kF32 : EntryFormat::kIndexFp4, index_dim, 0};
  const auto norm = [&](int64_t width) { return ops::RmsNorm::Desc{.width = width, .activation = dtype}; };
  const auto rope = [&](int64_t vectors, int64_t width) {
    return ops::Rope::Desc{.vectors = vectors, .width = width, .rope_dim = rope_dim, .activation = dtype};
  };
  const auto hadamard = [&](bool is_fp4) {
    return ops::Hadamard::Desc{.width = index_dim, .is_fp4 = is_fp4, .activation = dtype};
  };
  const auto write = [&](const ops::EntryLayout& layout) {
    return ops::CacheWrite::Desc{.layout = layout, .activation = dtype};
  };
  ops::NormRope::Desc desc{.sets = {{norm(head_dim), rope(heads, head_dim), {}, {}},
                                    {norm(head_dim), rope(1, head_dim), {}, write(kv)},
                                    {norm(head_dim), rope(1, head_dim), {}, write(kv)},
                                    {norm(index_dim), rope(1, index_dim), hadamard(false), write(key)},
                                    {{}, rope(heads, index_dim), hadamard(true), {}}}};
  desc.sets.resize(num_sets);
  return desc;
}

}  // namespace

std::vector<Spec<ops::NormRope>> specs_of(ops::NormRope, bool is_quick) {
  std::vector<Spec<ops::NormRope>> specs;
  constexpr EntryFormat kBf16Formats[] = {EntryFormat::kBf16, EntryFormat::kKvFp8Bf16},
                        kF32Formats[] = {EntryFormat::kF32, EntryFormat::kKvFp8F32};
  for (const DType dtype : kActivations) {
    for (const EntryFormat format : dtype == DType::kBF16 ? kBf16Formats : kF32Formats) {
      add_small<ops::NormRope>(specs, vectors_of_layer(3, 192, 64, 64, {format, 192, 64}, dtype, 5));
    }
    // Each by itself: few vectors may have another kernel than many.
    const EntryFormat plain = dtype == DType::kBF16 ? EntryFormat::kKvFp8Bf16 : EntryFormat::kKvFp8F32;
    for (const Set& set : vectors_of_layer(1, 192, 64, 64, {plain, 192, 64}, dtype, 5).sets) {
      add_small<ops::NormRope>(specs, {.sets = {set}});
      specs.push_back({{.sets = {set}}, 300, Fill::kMixed});
    }
    // More values than a block has at once, weights of all of them, and more pieces of an entry than it has warps.
    const ops::EntryLayout long_entry{dtype == DType::kBF16 ? EntryFormat::kBf16 : EntryFormat::kF32, 2000, 0};
    add_small<ops::NormRope>(specs, {.sets = {{ops::RmsNorm::Desc{.width = 2000, .activation = dtype},
                                               {.vectors = 1, .width = 2000, .rope_dim = 64, .activation = dtype},
                                               {},
                                               ops::CacheWrite::Desc{.layout = long_entry, .activation = dtype}}}});
    // Pairs that are no multiple of a warp.
    add_small<ops::NormRope>(
        specs, {.sets = {{ops::RmsNorm::Desc{.width = 77, .activation = dtype},
                          {.vectors = 3, .width = 77, .rope_dim = 34, .is_inverse = true, .activation = dtype},
                          {},
                          {}}}});
  }
  if (is_quick) return specs;
  for (const size_t num_sets : {2, 3, 5}) {
    add_published<ops::NormRope>(
        specs, vectors_of_layer(64, 512, 64, 128, {EntryFormat::kKvFp8Bf16, 512, 64}, DType::kBF16, num_sets),
        num_sets == 2   ? "Flash, window"
        : num_sets == 3 ? "Flash, ratio 128"
                        : "Flash, ratio 4");
  }
  return specs;
}

Case<ops::NormRope> make_case(Rng& rng, const Spec<ops::NormRope>& spec) {
  constexpr const char* kNames[] = {"queries", "window", "entries", "index keys", "index queries"};
  Case<ops::NormRope> one;
  for (size_t i = 0; i < spec.desc.sets.size(); ++i) {
    const Set& set = spec.desc.sets[i];
    ops::NormRope::Set& of = one.args.sets[i];
    const DType dtype = set.rope.activation;
    // Entries are fewer than tokens, or none.
    of.num_rows = i == 2 || i == 3 ? spec.num_tokens / 3 : spec.num_tokens;
    of.x = one.arrays.tensor(filled(rng, spec.fill, of.num_rows * set.rope.vectors, set.rope.width), dtype,
                             {of.num_rows, set.rope.vectors, set.rope.width});
    // Layers give queries no weight.
    if (set.norm && set.write) {
      of.weight = one.arrays.tensor(normal_values(rng, 1, set.rope.width), DType::kBF16, {set.rope.width});
    }
    std::vector<int64_t> positions;
    for (int64_t t = 0; t < of.num_rows; ++t) positions.push_back(static_cast<int64_t>(rng.below(1 << 20)));
    of.positions = one.arrays.array(positions);
    const ops::Yarn yarn;
    of.frequencies = one.arrays.array(ops::rope_frequencies(set.rope.rope_dim, 160000, &yarn));
    if (!set.write) {
      one.arrays.updates(kNames[i], of.x, Rule::kValues);
      continue;
    }
    one.arrays.clobbers(kNames[i], of.x);
    of.slots = one.arrays.array(random_slots(rng, of.num_rows));
    std::vector<TensorView> written;
    of.cache = one.arrays.paged_entries(rng, Fill::kNormal, set.write->layout, of.num_rows + 2, of.num_rows,
                                        static_cast<int>(rng.below(8)), &written);
    for (const TensorView& view : written) one.arrays.updates(kNames[i], view, Rule::kBits);
  }
  return one;
}

std::vector<Spec<ops::PoolNorm>> specs_of(ops::PoolNorm, bool is_quick) {
  std::vector<Spec<ops::PoolNorm>> specs;
  const auto pool = [](int64_t ratio, int64_t width, DType dtype) {
    return ops::CompressorPool::Desc{.ratio = ratio, .width = width, .activation = dtype};
  };
  for (const DType dtype : kActivations) {
    const ops::RmsNorm::Desc norm{.width = 77, .activation = dtype};
    // Some channels are another block's, and some threads have none.
    add_small<ops::PoolNorm>(specs, {.pools = {pool(4, 300, dtype), pool(4, 40, dtype)}, .norm = norm}, 11);
    add_small<ops::PoolNorm>(specs, {.pools = {pool(128, 136, dtype)}, .norm = norm}, 3 * 128 - 1);
    add_small<ops::PoolNorm>(specs, {.pools = {pool(4, 40, dtype), pool(128, 40, dtype)}});
    // More rows to norm, and to pool, than one launch takes.
    specs.push_back({{.pools = {pool(4, 24, dtype)}, .norm = norm}, 1100, Fill::kNormal, 11});
    specs.push_back({{.pools = {pool(4, 40, dtype), pool(4, 24, dtype)}, .norm = norm}, 259, Fill::kMixed, 11});
  }
  if (is_quick) return specs;
  const ops::RmsNorm::Desc norm{.width = 1024};
  add_published<ops::PoolNorm>(specs, {.pools = {pool(4, 512, DType::kBF16), pool(4, 128, DType::kBF16)}, .norm = norm},
                               "Flash, ratio 4", 19);
  add_published<ops::PoolNorm>(specs, {.pools = {pool(128, 512, DType::kBF16)}, .norm = norm}, "Flash, ratio 128", 639);
  return specs;
}

Case<ops::PoolNorm> make_case(Rng& rng, const Spec<ops::PoolNorm>& spec) {
  Case<ops::PoolNorm> one;
  for (size_t i = 0; i < spec.desc.pools.size(); ++i) {
    one.args.pools[i] = pool_arrays(
        rng, {.desc = spec.desc.pools[i], .num_tokens = spec.num_tokens, .fill = spec.fill, .context = spec.context},
        one.arrays);
  }
  if (!spec.desc.norm) return one;
  const ops::RmsNorm::Desc& norm = *spec.desc.norm;
  const Shape shape = {spec.num_tokens, norm.width};
  const TensorView x = one.arrays.tensor(filled(rng, spec.fill, shape[0], shape[1]), norm.activation, shape);
  one.arrays.updates("normed", x, Rule::kBits);
  one.args.norm = {.x = x,
                   .weight = one.arrays.tensor(normal_values(rng, 1, shape[1]), DType::kBF16, {shape[1]}),
                   .out = x,
                   .num_rows = shape[0]};
  return one;
}

std::vector<Spec<ops::AttentionRope>> specs_of(ops::AttentionRope, bool is_quick) {
  std::vector<Spec<ops::AttentionRope>> specs;
  const auto desc_of = [](int64_t heads, int64_t width, int64_t window) {
    const ops::Attention::Desc attention{.heads = heads,
                                         .head_dim = width,
                                         .window = window,
                                         .scale = 1 / std::sqrt(static_cast<float>(width)),
                                         .layout = {EntryFormat::kKvFp8Bf16, width, 64}};
    return ops::AttentionRope::Desc{attention, {.vectors = heads, .width = width, .rope_dim = 64, .is_inverse = true}};
  };
  for (const int64_t window : {16, 130}) {
    const ops::AttentionRope::Desc desc = desc_of(5, 192, window);
    add_small<ops::AttentionRope>(specs, desc, attention_context(0, 0, false));
    add_small<ops::AttentionRope>(specs, desc, attention_context(700, 129, true));
    // More parts than are spread over thread blocks.
    specs.push_back({desc, 1, Fill::kMixed, attention_context(900, 73 * ops::kAttentionPart, false)});
  }
  // Heads as wide as Hopper's kernels take them: in clusters, of one part, of some and of more than are spread; by
  // tiles of 64 heads, the same and more tokens than are spread; by the portable kernel.
  const ops::AttentionRope::Desc wide = desc_of(16, 512, 128);
  for (const int64_t num_entries : {0, 257}) {
    specs.push_back({wide, 1, Fill::kMixed, attention_context(900, num_entries, false)});
  }
  for (const int64_t tokens : {3, 17}) specs.push_back({wide, tokens, Fill::kMixed, attention_context(700, 129, true)});
  specs.push_back({wide, 5, Fill::kMixed, attention_context(900, 73 * ops::kAttentionPart, false)});
  specs.push_back({wide, 17, Fill::kMixed, attention_context(900, 19 * ops::kAttentionPart, false)});
  specs.push_back({wide, 47, Fill::kMixed, attention_context(700, 129, true)});
  specs.push_back({desc_of(64, 512, 128), 4, Fill::kMixed, attention_context(700, 600, true)});
  if (is_quick) return specs;
  const ops::AttentionRope::Desc desc = desc_of(64, 512, 128);
  add_published<ops::AttentionRope>(specs, desc, "Flash, window only", attention_context(1000, 0, false));
  add_published<ops::AttentionRope>(specs, desc, "Flash, ratio 4: 128 + 512 keys", attention_context(6000, 1500, true));
  add_published<ops::AttentionRope>(specs, desc, "Flash, ratio 128", attention_context(40000, 312, false));
  return specs;
}

Case<ops::AttentionRope> make_case(Rng& rng, const Spec<ops::AttentionRope>& spec) {
  Case<ops::AttentionRope> one;
  const ops::Yarn yarn;
  one.args.attention = attention_arrays(rng,
                                        {.desc = spec.desc.attention,
                                         .num_tokens = spec.num_tokens,
                                         .fill = spec.fill,
                                         .context = spec.context,
                                         .label = spec.label},
                                        one.arrays);
  one.args.frequencies = one.arrays.array(ops::rope_frequencies(spec.desc.rope.rope_dim, 160000, &yarn));
  one.args.num_tokens = spec.num_tokens;
  return one;
}

std::vector<Spec<ops::MhcPostPre>> specs_of(ops::MhcPostPre, bool is_quick) {
  std::vector<Spec<ops::MhcPostPre>> specs;
  // Before a layer's first sublayer, between the two, behind the second, and all at once.
  const auto add = [&](int64_t hidden, DType dtype, auto&& take) {
    const ops::MhcDesc mhc{.hidden = hidden, .activation = dtype};
    const ops::MoeCombine::Desc combine{.hidden = hidden, .top_k = 6, .activation = dtype};
    const ops::RmsNorm::Desc norm{.width = hidden, .activation = dtype};
    take({.mhc = mhc, .norm = norm});
    take({.mhc = mhc, .has_post = true, .norm = norm});
    take({.mhc = mhc, .combine = combine, .has_post = true});
    take({.mhc = mhc, .combine = combine, .has_post = true, .norm = norm});
  };
  for (const DType dtype : kActivations) {
    for (const int64_t hidden : {57, 264}) {
      add(hidden, dtype, [&](const ops::MhcPostPre::Desc& desc) {
        add_small<ops::MhcPostPre>(specs, desc);
        specs.push_back({desc, 69});  // as many as have a kernel of their own
      });
    }
  }
  if (is_quick) return specs;
  add(4096, DType::kBF16,
      [&](const ops::MhcPostPre::Desc& desc) { add_published<ops::MhcPostPre>(specs, desc, "Flash"); });
  return specs;
}

Case<ops::MhcPostPre> make_case(Rng& rng, const Spec<ops::MhcPostPre>& spec) {
  const ops::MhcPostPre::Desc& desc = spec.desc;
  const int64_t tokens = spec.num_tokens, hidden = desc.mhc.hidden;
  const DType dtype = desc.mhc.activation;
  Case<ops::MhcPostPre> one;
  const auto activations = [&](int64_t rows_per_token) {
    return one.arrays.tensor(filled(rng, spec.fill, tokens * rows_per_token, hidden), dtype,
                             {tokens, rows_per_token, hidden});
  };
  const TensorView x = activations(ops::kHcStreams);
  one.args.pre.x = x;
  if (desc.has_post) {
    one.args.post.x = x;
    one.args.post.o = activations(1);
    if (desc.combine) {
      one.args.combine.routed = activations(desc.combine->top_k);
      one.args.combine.shared = activations(1);
      one.args.combine.out = one.args.post.o;
      one.arrays.clobbers("o", one.args.post.o);
    }
    one.args.post.post = one.arrays.array(normal_values(rng, tokens, 4));
    one.args.post.comb = one.arrays.array(normal_values(rng, tokens, 16));
    if (desc.norm) {
      one.args.post.out = one.arrays.output("streams", dtype, x.shape, Rule::kBits);
    } else {  // in place, as layers do
      one.args.post.out = x;
      one.arrays.updates("streams", x, Rule::kBits);
    }
    one.args.pre.x = one.args.post.out;
  }
  if (desc.norm) {
    add_mixing(one.args.pre, one.arrays, rng, hidden, ops::kHcCoefficients, 3);
    one.args.pre.y = one.arrays.output("y", dtype, {tokens, hidden}, Rule::kValues);
    one.args.pre.post = one.arrays.output<float>("post", DType::kF32, {tokens, 4}, Rule::kNorm);
    one.args.pre.comb = one.arrays.output<float>("comb", DType::kF32, {tokens, 4, 4}, Rule::kNorm);
    one.args.weight = one.arrays.tensor(normal_values(rng, 1, hidden), DType::kBF16, {hidden});
  }
  one.args.num_tokens = tokens;
  return one;
}

std::vector<Spec<ops::LinearGroup>> specs_of(ops::LinearGroup, bool is_quick) {
  std::vector<Spec<ops::LinearGroup>> specs;
  // Maps of those widths; of some the output is FP32.
  const auto group = [](WeightFormat format, int64_t in, std::initializer_list<int64_t> outs, bool has_f32) {
    ops::LinearGroup::Desc desc;
    for (const int64_t out : outs) {
      ops::Linear::Desc map{.in = in, .out = out, .format = format};
      if (has_f32 && desc.maps.size() % 2 == 1) map.output = DType::kF32;
      if (format == WeightFormat::kF32) {
        map.input = InputMode::kF32, map.activation = map.output = DType::kF32;
      }
      desc.maps.push_back(map);
    }
    return desc;
  };
  const auto gated = [&](WeightFormat format, int64_t in, int64_t inner) {
    ops::LinearGroup::Desc desc = group(format, in, {inner, inner}, false);
    desc.swiglu = {.inner = inner, .limit = 10, .activation = desc.maps[0].activation};
    return desc;
  };
  for (const WeightFormat format :
       {WeightFormat::kF32, WeightFormat::kBf16, WeightFormat::kFp8Block, WeightFormat::kNvfp4}) {
    // Ragged tiles, and more than one chunk of a tensor-core kernel with a ragged last one.
    add_small<ops::LinearGroup>(specs, group(format, 128, {5, 67, 16, 1, 33}, true));
    add_small<ops::LinearGroup>(specs, group(format, 1152, {33, 64}, false));
    for (const int64_t in : {48, 1152}) add_small<ops::LinearGroup>(specs, gated(format, in, 37));
  }
  // Of two formats, of which BF16 is one and comes first or not.
  const auto with_bf16 = [&](WeightFormat format, int64_t in, std::initializer_list<int64_t> outs,
                             std::initializer_list<int64_t> bf16_outs, bool is_first = false) {
    ops::LinearGroup::Desc desc = group(format, in, outs, false);
    const ops::LinearGroup::Desc bf16 = group(WeightFormat::kBf16, in, bf16_outs, true);
    desc.maps.insert(is_first ? desc.maps.begin() : desc.maps.end() - 1, bf16.maps.begin(), bf16.maps.end());
    return ops::by_format(std::move(desc));
  };
  for (const WeightFormat format : {WeightFormat::kFp8Block, WeightFormat::kNvfp4}) {
    add_small<ops::LinearGroup>(specs, with_bf16(format, 128, {5, 67}, {1, 33, 16, 40, 3}));
    add_small<ops::LinearGroup>(specs, with_bf16(format, 1152, {33, 64}, {48}, true));
    add_small<ops::LinearGroup>(specs, with_bf16(format, 1024, {384, 16}, {48}));  // a ring, on a GPU that is small
  }
  // NVFP4 inputs, which are rounded once for all maps; behind a norm too.
  const auto of_nvfp4 = [](ops::LinearGroup::Desc desc, bool has_norm) {
    for (ops::Linear::Desc& map : desc.maps) map.input = InputMode::kA4;
    if (has_norm) desc.norm = {.width = desc.maps[0].in};
    return desc;
  };
  for (const bool has_norm : {false, true}) {
    add_small<ops::LinearGroup>(specs, of_nvfp4(group(WeightFormat::kNvfp4, 1152, {33, 300}, true), has_norm));
    add_small<ops::LinearGroup>(specs, of_nvfp4(group(WeightFormat::kNvfp4, 208, {130}, false), has_norm));
    add_small<ops::LinearGroup>(specs, of_nvfp4(gated(WeightFormat::kNvfp4, 80, 37), has_norm));
  }
  if (is_quick) return specs;
  add_published<ops::LinearGroup>(specs, of_nvfp4(group(WeightFormat::kNvfp4, 1024, {32768, 8192}, false), true),
                                  "Flash q_norm, wq_b, indexer wq_b");
  for (const WeightFormat format : {WeightFormat::kFp8Block, WeightFormat::kNvfp4}) {
    add_published<ops::LinearGroup>(specs, group(format, 4096, {1024, 512}, false), "Flash wq_a, wkv");
    add_published<ops::LinearGroup>(specs, group(format, 1024, {32768, 8192}, false), "Flash wq_b, indexer wq_b");
    add_published<ops::LinearGroup>(specs, gated(format, 4096, 2048), "Flash shared expert");
  }
  for (const WeightFormat format : {WeightFormat::kFp8Block, WeightFormat::kNvfp4}) {
    add_published<ops::LinearGroup>(specs, with_bf16(format, 4096, {1024, 512}, {1024, 1024, 256, 256, 64}),
                                    "Flash maps of the input of ratio 4");
  }
  add_published<ops::LinearGroup>(specs, group(WeightFormat::kBf16, 4096, {1024, 1024, 256, 256, 64}, true),
                                  "Flash compressors of ratio 4");
  return specs;
}

Case<ops::LinearGroup> make_case(Rng& rng, const Spec<ops::LinearGroup>& spec) {
  const ops::LinearGroup::Desc& desc = spec.desc;
  const int64_t tokens = spec.num_tokens, in = desc.maps[0].in;
  Case<ops::LinearGroup> one;
  one.args.x = one.arrays.tensor(filled(rng, spec.fill, tokens, in), desc.maps[0].activation, {tokens, in});
  if (desc.norm) one.args.norm_weight = one.arrays.tensor(filled(rng, Fill::kNormal, 1, in), DType::kBF16, {in});
  for (size_t i = 0; i < desc.maps.size(); ++i) {
    const ops::Linear::Desc& map = desc.maps[i];
    one.args.weights[i] = one.arrays.weight(rng, map.format, map.out, in);
    const Shape shape = {tokens, map.out};
    if (desc.swiglu && i == 1) {
      one.args.y[i] = one.arrays.tensor(filled(rng, Fill::kNormal, tokens, map.out), map.output, shape);
      one.arrays.clobbers("up", one.args.y[i]);
    } else {
      one.args.y[i] = one.arrays.output("y", map.output, shape, desc.swiglu ? Rule::kRows : Rule::kValues);
    }
  }
  one.args.num_tokens = tokens;
  return one;
}

std::vector<Spec<ops::AllExperts>> specs_of(ops::AllExperts, bool is_quick) {
  std::vector<Spec<ops::AllExperts>> specs;
  // The shared expert, of that width and format, beside routed ones.
  const auto with_shared = [](const ops::MoeExperts::Desc& routed, int64_t inner, WeightFormat format) {
    const auto map = [&](int64_t in, int64_t out) {
      return ops::Linear::Desc{.in = in,
                               .out = out,
                               .format = format,
                               .input = routed.input,
                               .activation = routed.activation,
                               .output = routed.activation};
    };
    const ops::Linear::Desc gate = map(routed.hidden, inner);
    const ops::SwiGlu::Desc swiglu{.inner = inner, .limit = routed.swiglu_limit, .activation = routed.activation};
    return ops::AllExperts::Desc{
        .routed = routed, .gated = {.maps = {gate, gate}, .swiglu = swiglu}, .down = map(inner, routed.hidden)};
  };
  ops::MoeExperts::Desc routed{
      .hidden = 48, .inner = 80, .first_expert = 1, .num_local = 4, .top_k = 3, .swiglu_limit = 10};
  add_small<ops::AllExperts>(specs, with_shared(routed, 80, WeightFormat::kNvfp4));
  add_small<ops::AllExperts>(specs, with_shared(routed, 37, WeightFormat::kFp8Block));
  routed.format = WeightFormat::kF32, routed.input = InputMode::kF32, routed.activation = DType::kF32;
  add_small<ops::AllExperts>(specs, with_shared(routed, 80, WeightFormat::kF32));
  // Whole units of packed weights, and not; few of all experts, so that few slots are expected.
  routed = {
      .hidden = 512, .inner = 512, .first_expert = 1, .num_local = 3, .num_experts = 64, .top_k = 3, .swiglu_limit = 1};
  add_small<ops::AllExperts>(specs, with_shared(routed, 512, WeightFormat::kNvfp4));
  add_small<ops::AllExperts>(specs, with_shared(routed, 512, WeightFormat::kFp8Block));
  routed.hidden = 640, routed.inner = 384;
  add_small<ops::AllExperts>(specs, with_shared(routed, 384, WeightFormat::kNvfp4));
  if (is_quick) return specs;
  const ops::MoeExperts::Desc flash{.hidden = 4096, .inner = 2048, .num_local = 8, .top_k = 6, .swiglu_limit = 10};
  for (const int64_t tokens : {1, 2, 17}) {
    for (const WeightFormat format : {WeightFormat::kNvfp4, WeightFormat::kFp8Block}) {
      specs.push_back(
          {with_shared(flash, 2048, format), tokens, Fill::kMixed, 0, "Flash, 8 of 256 experts and the shared one"});
    }
  }
  return specs;
}

Case<ops::AllExperts> make_case(Rng& rng, const Spec<ops::AllExperts>& spec) {
  const ops::AllExperts::Desc& desc = spec.desc;
  const int64_t tokens = spec.num_tokens, hidden = desc.down.out, inner = desc.down.in;
  const DType dtype = desc.routed.activation;
  Case<ops::MoeExperts> routed =
      make_case(rng, Spec<ops::MoeExperts>{desc.routed, tokens, spec.fill, spec.context, spec.label, spec.form});
  Case<ops::AllExperts> one{{}, std::move(routed.arrays)};
  one.args.routed = routed.args;
  ops::LinearGroup::Args& gated = one.args.gated;
  gated.x = one.args.routed.x;
  for (size_t i = 0; i < 2; ++i) {
    gated.weights[i] = one.arrays.weight(rng, desc.gated.maps[i].format, inner, hidden);
    gated.y[i] = one.arrays.tensor(filled(rng, Fill::kNormal, tokens, inner), dtype, {tokens, inner});
    one.arrays.clobbers(i == 0 ? "gate" : "up", gated.y[i]);
  }
  one.args.down.x = gated.y[0];
  one.args.down.weight = one.arrays.weight(rng, desc.down.format, hidden, inner);
  one.args.down.y = one.arrays.output("shared", dtype, {tokens, hidden}, Rule::kRows);
  one.args.num_tokens = tokens;
  return one;
}

// One rank, whose reference says what ranks give: kernels want others (tests/backends/rank_experts_test.cc).
std::vector<Spec<ops::RankExperts>> specs_of(ops::RankExperts, bool) {
  std::vector<Spec<ops::RankExperts>> specs;
  add_small<ops::RankExperts>(
      specs, {.routed = {.hidden = 48, .inner = 80, .num_local = 4, .top_k = 3, .swiglu_limit = 10}, .world = 1});
  return specs;
}

Case<ops::RankExperts> make_case(Rng& rng, const Spec<ops::RankExperts>& spec) {
  const ops::MoeExperts::Desc& desc = spec.desc.routed;
  const int64_t tokens = spec.num_tokens;
  Case<ops::RankExperts> one;
  one.args.routed = expert_inputs(
      rng, Spec<ops::MoeExperts>{desc, tokens, spec.fill, spec.context, spec.label, spec.form}, one.arrays);
  one.args.shared =
      one.arrays.tensor(filled(rng, spec.fill, tokens, desc.hidden), desc.activation, {tokens, desc.hidden});
  one.args.out = one.arrays.output("sum", desc.activation, {tokens, desc.hidden}, Rule::kRows);
  one.args.num_tokens = tokens;
  return one;
}

}  // namespace tessera::verify
