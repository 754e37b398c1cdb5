// SPDX-License-Identifier: Apache-2.0
#pragma once
// The indexer's scores for kernels that take a block of keys and some tokens.
#include <string>

#include "backends/cpu_common/index_job.h"
#include "ops/indexer/indexer.h"

namespace tessera::backends::cpu_common {

using IndexKernel = void (*)(const IndexJob& job);

bool index_scores_supports(const ops::IndexScores::Desc& desc, std::string& why_not);
// Spreads blocks of keys, and where these are few, tokens too.
void index_scores_run(IndexKernel kernel, const ops::IndexScores::Desc& desc, const ops::IndexScores::Args& args,
                      device::Queue& queue);

template <IndexKernel kKernel>
constexpr ops::Variant<ops::IndexScores> index_scores_variant(const char* name,
                                                              bool (*runs_on)(const device::Machine&,
                                                                              std::string&) = nullptr) {
  return {name,
          index_scores_supports,
          nullptr,
          nullptr,
          [](const ops::IndexScores::Desc& desc, const ops::IndexScores::Args& args, device::Queue& queue) {
            index_scores_run(kKernel, desc, args, queue);
          },
          runs_on};
}

}  // namespace tessera::backends::cpu_common
