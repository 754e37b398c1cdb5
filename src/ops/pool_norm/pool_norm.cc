// SPDX-License-Identifier: Apache-2.0
#include "ops/pool_norm/pool_norm.h"

#include <fmt/format.h>

namespace tessera::ops {

std::string PoolNorm::Desc::to_string() const {
  std::string text;
  for (const CompressorPool::Desc& pool : pools) text += (text.empty() ? "" : "; ") + pool.to_string();
  return norm ? text + "; norm " + norm->to_string() : text;
}

bool pool_norm_reference_supports(const PoolNorm::Desc& desc, std::string& why_not) {
  if (desc.pools.empty() || desc.pools.size() > PoolNorm::kMostPools) {
    why_not = fmt::format("one to {} compressors, not {}", PoolNorm::kMostPools, desc.pools.size());
    return false;
  }
  return !desc.norm || rms_norm_reference_supports(*desc.norm, why_not);
}

void pool_norm_reference(const PoolNorm::Desc& desc, const PoolNorm::Args& args, device::Queue& queue) {
  for (size_t i = 0; i < desc.pools.size(); ++i) compressor_pool_reference(desc.pools[i], args.pools[i], queue);
  if (desc.norm) rms_norm_reference(*desc.norm, args.norm, queue);
}

}  // namespace tessera::ops
