// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence.h"

namespace tessera::engine {

std::string_view to_string(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone:
      return "none";
    case FinishReason::kEndOfText:
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      return "cancelled";
    case FinishReason::kFailed:
      return "failed";
  }
  return "none";
}

}  // namespace tessera::engine
