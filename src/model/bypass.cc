// SPDX-License-Identifier: Apache-2.0
#include "model/bypass.h"

#include <fmt/format.h>

#include "base/error.h"
#include "base/strings.h"

namespace tessera::model {

Bypass parse_bypass(const std::string& text) {
  Bypass bypass;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    if (part == "routed_experts") {
      bypass.routed_experts = true;
    } else if (part == "shared_experts") {
      bypass.shared_experts = true;
    } else if (part == "compressed_entries") {
      bypass.compressed_entries = true;
    } else {
      fail(ErrorCode::kInvalidArgument,
           fmt::format("TESSERA_BYPASS: expected routed_experts, shared_experts or compressed_entries, found \"{}\"",
                       printable(part, 60)));
    }
    begin = end + 1;
  }
  return bypass;
}

}  // namespace tessera::model
