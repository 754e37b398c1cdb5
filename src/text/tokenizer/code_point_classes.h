// SPDX-License-Identifier: Apache-2.0
#pragma once
// What regular expressions say of each code point, asked of them once, 256 at a time, when a text has one of those.
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer/regex_split.h"

namespace tessera::text {

class CodePointClasses {
 public:
  // Bit i of a code point's class: pattern i matches it alone. At most 8 patterns.
  CodePointClasses(const std::vector<std::string>& patterns, const std::string& where);
  ~CodePointClasses();

  // Of a Unicode scalar value. Threads may call it at once.
  uint8_t of(char32_t code_point) const {
    const Page* page = pages_[code_point >> 8].load(std::memory_order_acquire);
    return (page != nullptr ? *page : make_page(code_point >> 8))[code_point & 0xFF];
  }

 private:
  using Page = std::array<uint8_t, 256>;
  static constexpr size_t kPages = 0x110000 >> 8;
  const Page& make_page(size_t page_idx) const;

  std::vector<RegexSplit> patterns_;
  const std::unique_ptr<std::atomic<const Page*>[]> pages_;
};

}  // namespace tessera::text
