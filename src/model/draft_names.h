// SPDX-License-Identifier: Apache-2.0
#pragma once
// The tensors of draft blocks, "mtp.N....": the classic block (MTP) and DSpark's stages. What of them is not run is
// known by these names and kept aside. Source: the tensor names of deepseek-ai/DeepSeek-V4-Flash and -Flash-DSpark.
#include <set>
#include <string>
#include <string_view>

#include "model/config.h"

namespace tessera::model {

class DraftNames {
 public:
  explicit DraftNames(const Config& config);
  // Whether a tensor belongs to a draft block: a layer that attends to a window only, with linear maps in any format
  // that can be read, and what comes before and behind it. Matched whole, never by substring.
  bool has(std::string_view tensor) const;

 private:
  std::set<std::string, std::less<>> linears_, others_;  // behind "mtp.N."
};

}  // namespace tessera::model
