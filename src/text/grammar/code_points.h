// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sets of Unicode's code points, as regular expressions have them.
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace tessera::text {

class CodePoints {
 public:
  using Range = std::pair<uint32_t, uint32_t>;  // first and last
  static constexpr uint32_t kLast = 0x10FFFF;

  CodePoints() = default;
  CodePoints(std::initializer_list<Range> ranges);

  void add(Range range);
  void add(const CodePoints& other);
  CodePoints others() const;  // all that are not in it
  CodePoints without(const CodePoints& other) const;

  bool is_empty() const { return ranges_.empty(); }
  std::span<const Range> ranges() const { return ranges_; }  // in order, apart from each other

 private:
  std::vector<Range> ranges_;
};

}  // namespace tessera::text
