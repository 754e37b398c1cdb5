// SPDX-License-Identifier: Apache-2.0
#pragma once
// Attention over window and compressed entries for kernels that take one token and some of its heads, or a part of its
// keys.
#include <cstdint>
#include <string>

#include "backends/cpu_common/attention_job.h"
#include "ops/attention/attention.h"

namespace tessera::backends::cpu_common {

bool attention_supports(const ops::Attention::Desc& desc, std::string& why_not);
int64_t attention_workspace(const ops::Attention::Desc& desc, int64_t max_tokens);
// Spreads tokens, and where these are few, heads too, or the steps of each token.
void attention_run(const AttentionKernels& kernels, const ops::Attention::Desc& desc, const ops::Attention::Args& args,
                   device::Queue& queue);

template <const AttentionKernels& kKernels>
constexpr ops::Variant<ops::Attention> attention_variant(const char* name, bool (*runs_on)(const device::Machine&,
                                                                                           std::string&) = nullptr) {
  return {name,
          attention_supports,
          nullptr,
          attention_workspace,
          [](const ops::Attention::Desc& desc, const ops::Attention::Args& args, device::Queue& queue) {
            attention_run(kKernels, desc, args, queue);
          },
          runs_on};
}

}  // namespace tessera::backends::cpu_common
