// SPDX-License-Identifier: Apache-2.0
#pragma once
// Linear maps of one input: y[i] = linear(x, weights[i]). With `norm` their input is rms_norm(x). With `swiglu` there
// are two maps, gate and up, whose activation becomes y[0]. With neither, weights may be of several formats. Fused
// (decision 0023): every result has the bits that rms_norm, linear and swiglu give one after the other, with their
// rounding points. Source: those ops' contracts.
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ops/linear/linear.h"
#include "ops/moe/moe.h"
#include "ops/rms_norm/rms_norm.h"

namespace tessera::ops {

struct LinearGroup {
  static constexpr const char* kName = "linear_group";
  static constexpr bool kIsFused = true;
  static constexpr size_t kMostMaps = 7;
  struct Part;
  struct Desc {
    std::vector<Linear::Desc> maps;  // of one group; alike but for `out`, `output` and `format`
    std::optional<SwiGlu::Desc> swiglu = {};
    std::optional<RmsNorm::Desc> norm = {};
    std::vector<Part> parts = {};  // of several formats: by_format()
    std::string to_string() const;
  };
  // As many maps as the description has.
  struct Args {
    TensorView x;                               // [tokens, in]
    TensorView norm_weight = {};                // [in] BF16 or F32; with norm
    std::array<WeightView, kMostMaps> weights;  // [out, in]
    std::array<TensorView, kMostMaps> y = {};   // [tokens, out]; with swiglu y[1] is scratch
    int64_t num_tokens = 0;
    void* workspace = nullptr;
  };
  // The maps of one format, as a call of their own, whose map i is the group's map members[i].
  struct Part {
    Desc desc;
    std::vector<size_t> members;
    Args args_of(const Args& group) const;
  };
};

int64_t linear_group_reference_workspace(const LinearGroup::Desc& desc, int64_t max_tokens);
bool linear_group_reference_supports(const LinearGroup::Desc& desc, std::string& why_not);
void linear_group_reference(const LinearGroup::Desc& desc, const LinearGroup::Args& args, device::Queue& queue);

// The call of its norm, into the begin of the workspace, and what remains of the call behind it; of its map `i` alone,
// and of its swiglu.
RmsNorm::Args norm_of_group(const LinearGroup::Desc& desc, const LinearGroup::Args& args);
LinearGroup::Args behind_norm(const LinearGroup::Desc& desc, const LinearGroup::Args& args);
Linear::Args linear_of_group(const LinearGroup::Args& args, size_t i);
SwiGlu::Args swiglu_of_group(const LinearGroup::Args& args);

// The same with its maps of each format as parts, in the order of their first ones; none where all have one format.
LinearGroup::Desc by_format(LinearGroup::Desc desc);

// The maps one by one, and then its swiglu, by those functions. For groups without a norm.
void run_parts(const LinearGroup::Desc& desc, const LinearGroup::Args& args, device::Queue& queue,
               void (*linear)(const Linear::Desc&, const Linear::Args&, device::Queue&),
               void (*swiglu)(const SwiGlu::Desc&, const SwiGlu::Args&, device::Queue&));

}  // namespace tessera::ops
