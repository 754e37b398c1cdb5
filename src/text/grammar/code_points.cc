// SPDX-License-Identifier: Apache-2.0
#include "text/grammar/code_points.h"

#include <algorithm>

namespace tessera::text {

CodePoints::CodePoints(std::initializer_list<Range> ranges) {
  for (const Range& range : ranges) add(range);
}

void CodePoints::add(Range range) {
  // Those that it meets or touches become part of it.
  const auto first = std::ranges::find_if(ranges_, [&](const Range& r) { return r.second + 1 >= range.first; });
  auto last = first;
  for (; last != ranges_.end() && last->first <= range.second + 1; ++last) {
    range = {std::min(range.first, last->first), std::max(range.second, last->second)};
  }
  ranges_.insert(ranges_.erase(first, last), range);
}

void CodePoints::add(const CodePoints& other) {
  for (const Range& range : other.ranges_) add(range);
}

CodePoints CodePoints::others() const {
  CodePoints out;
  uint32_t next = 0;
  for (const Range& range : ranges_) {
    if (range.first > next) out.ranges_.emplace_back(next, range.first - 1);
    next = range.second + 1;
  }
  if (next <= kLast) out.ranges_.emplace_back(next, kLast);
  return out;
}

CodePoints CodePoints::without(const CodePoints& other) const {
  CodePoints gone = others();
  gone.add(other);
  return gone.others();
}

}  // namespace tessera::text
