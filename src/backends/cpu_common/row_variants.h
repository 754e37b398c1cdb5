// SPDX-License-Identifier: Apache-2.0
#pragma once
// Entries of a backend's tables for one set of row kernels.
#include <span>
#include <tuple>

#include "backends/cpu_common/rows.h"

namespace tessera::backends::cpu_common {

// The one variant of an op, "rows".
template <class Op, const RowKernels& kKernels, bool (*kSupports)(const typename Op::Desc&, std::string&),
          void (*kRun)(const RowKernels&, const typename Op::Desc&, const typename Op::Args&, device::Queue&),
          int64_t (*kWorkspace)(const typename Op::Desc&, int64_t) = nullptr>
inline constexpr ops::Variant<Op> kRowVariant[1] = {{"rows", kSupports, nullptr, kWorkspace,
                                                     [](const typename Op::Desc& desc, const typename Op::Args& args,
                                                        device::Queue& queue) { kRun(kKernels, desc, args, queue); }}};

inline constexpr ops::Variant<ops::Embedding> kEmbeddingVariant[1] = {
    {"rows", embedding_supports, nullptr, nullptr, embedding_run}};
inline constexpr ops::Variant<ops::TopK> kTopKVariant[1] = {
    {"radix", [](const ops::TopK::Desc&, std::string&) { return true; }, nullptr, nullptr, top_k_run}};

// `all` and the ops of rows.h.
template <const RowKernels& kKernels>
constexpr ops::AllVariants with_row_variants(ops::AllVariants all) {
  using namespace ops;
  const auto set = [&]<class Op>(const Variant<Op>(&variant)[1]) {
    std::get<std::span<const Variant<Op>>>(all.lists) = variant;
  };
  set(kEmbeddingVariant);
  set(kTopKVariant);
  set(kRowVariant<RmsNorm, kKernels, rms_norm_supports, rms_norm_run>);
  set(kRowVariant<Rope, kKernels, rope_supports, rope_run>);
  set(kRowVariant<MhcPre, kKernels, mhc_supports, mhc_pre_run>);
  set(kRowVariant<MhcPost, kKernels, mhc_supports, mhc_post_run>);
  set(kRowVariant<MhcHead, kKernels, mhc_supports, mhc_head_run>);
  set(kRowVariant<SwiGlu, kKernels, swiglu_supports, swiglu_run>);
  set(kRowVariant<MoeCombine, kKernels, moe_combine_supports, moe_combine_run>);
  set(kRowVariant<StreamAdd, kKernels, stream_add_supports, stream_add_run>);
  set(kRowVariant<Hadamard, kKernels, hadamard_supports, hadamard_run>);
  set(kRowVariant<CacheWrite, kKernels, cache_write_supports, cache_write_run>);
  set(kRowVariant<CompressorPool, kKernels, compressor_pool_supports, compressor_pool_run>);
  set(kRowVariant<Router, kKernels, router_supports, router_run>);
  set(kRowVariant<Sample, kKernels, sample_supports, sample_run, sample_workspace>);
  return all;
}

}  // namespace tessera::backends::cpu_common
