// SPDX-License-Identifier: Apache-2.0
#pragma once
// Attention over window and compressed entries for kernels that take one token and some of its heads.
#include <cstdint>
#include <string>

#include "backends/cpu_common/attention_job.h"
#include "ops/attention/attention.h"

namespace tessera::backends::cpu_common {

using AttentionKernel = void (*)(const AttentionJob& job);

bool attention_supports(const ops::Attention::Desc& desc, std::string& why_not);
// Spreads tokens, and where these are few, heads too.
void attention_run(AttentionKernel kernel, const ops::Attention::Desc& desc, const ops::Attention::Args& args,
                   device::Queue& queue);

template <AttentionKernel kKernel>
constexpr ops::Variant<ops::Attention> attention_variant(const char* name, bool (*runs_on)(const device::Machine&,
                                                                                           std::string&) = nullptr) {
  return {name,
          attention_supports,
          nullptr,
          nullptr,
          [](const ops::Attention::Desc& desc, const ops::Attention::Args& args, device::Queue& queue) {
            attention_run(kKernel, desc, args, queue);
          },
          runs_on};
}

}  // namespace tessera::backends::cpu_common
