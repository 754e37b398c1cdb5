// SPDX-License-Identifier: Apache-2.0
#pragma once
// Parts of the model that can be left out to bisect a wrong result. Whoever sets one says so loudly: the output is not
// the model's.
#include <string>

namespace tessera::model {

struct Bypass {
  bool routed_experts = false;
  bool shared_experts = false;
  bool compressed_entries = false;  // attention sees the window alone
  bool any() const { return routed_experts || shared_experts || compressed_entries; }
};

// "routed_experts,shared_experts,compressed_entries". Throws kInvalidArgument for anything else.
Bypass parse_bypass(const std::string& text);

}  // namespace tessera::model
