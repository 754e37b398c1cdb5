// SPDX-License-Identifier: Apache-2.0
#include "model/bypass.h"

#include <fmt/format.h>

#include "base/error.h"
#include "base/strings.h"

namespace tessera::model {

Bypass parse_bypass(const std::string& text) {
  Bypass bypass;
  if (text.empty()) return bypass;
  for (const std::string_view part : split(text, ',')) {
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
  }
  return bypass;
}

}  // namespace tessera::model
