// SPDX-License-Identifier: Apache-2.0
#pragma once
// A backend: a name, when it can run, how it was verified, and for each op its variants, best first.
#include <span>
#include <string>
#include <tuple>

#include "device/machine.h"
#include "ops/all_experts/all_experts.h"
#include "ops/attention/attention.h"
#include "ops/attention_rope/attention_rope.h"
#include "ops/cache_write/cache_write.h"
#include "ops/compressor/compressor.h"
#include "ops/embedding/embedding.h"
#include "ops/finite_check/finite_check.h"
#include "ops/grouped_linear/grouped_linear.h"
#include "ops/hadamard/hadamard.h"
#include "ops/indexer/indexer.h"
#include "ops/linear/linear.h"
#include "ops/linear_group/linear_group.h"
#include "ops/mhc/mhc.h"
#include "ops/mhc_post_pre/mhc_post_pre.h"
#include "ops/moe/moe.h"
#include "ops/norm_rope/norm_rope.h"
#include "ops/pool_norm/pool_norm.h"
#include "ops/quantize_nvfp4/quantize_nvfp4.h"
#include "ops/random_fill/random_fill.h"
#include "ops/rank_experts/rank_experts.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/rope/rope.h"
#include "ops/router/router.h"
#include "ops/sample/sample.h"
#include "ops/stream_add/stream_add.h"
#include "ops/variant.h"

namespace tessera::ops {

// How far a backend has been proved; printed wherever it is chosen.
enum class Verification { kRunOnHardware, kEmulated, kCompiledOnly };
std::string_view to_string(Verification verification);

template <class... Ops>
struct VariantLists {
  std::tuple<std::span<const Variant<Ops>>...> lists;
};

// Every op: the model's, the two that make weights, the fused ones, and one for other programs. A new op adds its type
// here.
using AllVariants = VariantLists<Embedding, RmsNorm, Rope, MhcPre, MhcPost, MhcHead, Linear, MoeExperts, SwiGlu,
                                 MoeCombine, Router, CacheWrite, Hadamard, CompressorPool, IndexScores, TopK, Attention,
                                 StreamAdd, FiniteCheck, Sample, RandomFill, QuantizeNvfp4, NormRope, MhcPostPre,
                                 LinearGroup, AllExperts, PoolNorm, AttentionRope, GroupedLinear, RankExperts>;

// Lists for some of the ops: make_variants(kLinear, kMoeExperts), each an array of variants; the other ops have none.
template <class... Lists>
constexpr AllVariants make_variants(const Lists&... lists) {
  AllVariants all{};
  ((std::get<std::span<std::remove_extent_t<const Lists>>>(all.lists) = lists), ...);
  return all;
}

struct Backend {
  const char* name;
  // False where this machine can't run it; `why_not` says why.
  bool (*available)(const device::Machine& machine, std::string& why_not);
  Verification verification;
  AllVariants variants;
  bool is_on_gpu = false;  // addresses in Args are a GPU's, and the queue is a stream
  // The backend whose kernels compute what this one has no faster ones for: its ops may be parts of this one's fused
  // ops. Null: none.
  const Backend* extends = nullptr;

  template <class Op>
  std::span<const Variant<Op>> variants_of() const {
    return std::get<std::span<const Variant<Op>>>(variants.lists);
  }
};

// Whether TESSERA_BACKENDS (machine.backends) has this backend's name in it.
bool is_named(const Backend& backend, const device::Machine& machine);

// False where TESSERA_BACKENDS leaves the backend out, where it works in other memory than the machine's choice
// (Machine::gpu), or where the machine can't run it; `why_not` says why.
bool is_usable(const Backend& backend, const device::Machine& machine, std::string& why_not);

}  // namespace tessera::ops
