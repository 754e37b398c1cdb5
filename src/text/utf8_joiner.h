// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bytes that arrive in parts -> whole UTF-8. Invalid bytes become U+FFFD; any cutting of the bytes gives the same text.
#include <string>
#include <string_view>
#include <utility>

#include "base/strings.h"

namespace tessera::text {

class Utf8Joiner {
 public:
  // The text that is complete now; bytes of an unfinished sequence wait.
  std::string push(std::string_view bytes) {
    pending_ += bytes;
    const size_t complete = complete_utf8_prefix(pending_);
    std::string text = replace_invalid_utf8(std::string_view(pending_).substr(0, complete));
    pending_.erase(0, complete);
    return text;
  }
  // What still waits, as U+FFFD.
  std::string finish() { return replace_invalid_utf8(std::exchange(pending_, "")); }

 private:
  std::string pending_;
};

}  // namespace tessera::text
