// SPDX-License-Identifier: Apache-2.0
#include "text/tokenizer/code_point_classes.h"

#include "base/error.h"
#include "base/strings.h"

namespace tessera::text {

CodePointClasses::CodePointClasses(const std::vector<std::string>& patterns, const std::string& where)
    : pages_(std::make_unique<std::atomic<const Page*>[]>(kPages)) {
  TESSERA_CHECK(patterns.size() <= 8, "a class has eight bits");
  for (const std::string& pattern : patterns) patterns_.emplace_back(pattern, where);
}

CodePointClasses::~CodePointClasses() {
  for (size_t i = 0; i < kPages; ++i) delete pages_[i].load();
}

// Several threads may make the same one; the first to be done is kept.
const CodePointClasses::Page& CodePointClasses::make_page(size_t page_idx) const {
  auto page = std::make_unique<Page>();
  std::string text;
  for (size_t i = 0; i < page->size(); ++i) {
    const char32_t code_point = static_cast<char32_t>(page_idx << 8 | i);
    (*page)[i] = 0;
    if (code_point >= 0xD800 && code_point < 0xE000) continue;  // no text has them
    text.clear();
    append_utf8(text, code_point);
    for (size_t bit = 0; bit < patterns_.size(); ++bit) {
      if (patterns_[bit].matches(text)) (*page)[i] |= static_cast<uint8_t>(1u << bit);
    }
  }
  const Page* expected = nullptr;
  if (pages_[page_idx].compare_exchange_strong(expected, page.get(), std::memory_order_acq_rel)) return *page.release();
  return *expected;
}

}  // namespace tessera::text
