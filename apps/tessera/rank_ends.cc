// SPDX-License-Identifier: Apache-2.0
#include "rank_ends.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <map>
#include <utility>

#include "comm/bootstrap.h"
#include "comm/message.h"

namespace tessera::app {

namespace {

// With what is before them less than PIPE_BUF: ranks write at once, and none into another's words.
constexpr size_t kMostWords = 3000;

}  // namespace

bool hand_over(int pipe, const RankEnd& end) {
  std::signal(SIGPIPE, SIG_IGN);
  const std::string words = end.fault.message.substr(0, kMostWords);
  std::vector<uint8_t> bytes;
  comm::append_u32(bytes, static_cast<uint32_t>(end.rank));
  comm::append_u32(bytes, static_cast<uint32_t>(end.fault.code));
  comm::append_u32(bytes, static_cast<uint32_t>(words.size()));
  bytes.insert(bytes.end(), words.begin(), words.end());
  return write(pipe, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size());
}

std::vector<RankEnd> handed_over(int pipe) {
  std::vector<uint8_t> bytes;
  std::array<uint8_t, 4096> part{};
  for (ssize_t count = 0; (count = read(pipe, part.data(), part.size())) > 0;) {
    bytes.insert(bytes.end(), part.begin(), part.begin() + count);
  }
  std::vector<RankEnd> ends;
  constexpr size_t kHead = 3 * sizeof(uint32_t);
  for (size_t at = 0; at + kHead <= bytes.size();) {
    RankEnd& end = ends.emplace_back();
    end.rank = static_cast<int>(comm::read_u32(bytes, at));
    end.fault.code = static_cast<int>(comm::read_u32(bytes, at));
    const size_t size = comm::read_u32(bytes, at);
    const auto begin = bytes.begin() + static_cast<ptrdiff_t>(at);
    at += std::min(size, bytes.size() - at);
    end.fault.message.assign(begin, bytes.begin() + static_cast<ptrdiff_t>(at));
  }
  return ends;
}

GroupEnd end_together(std::vector<RankEnd> ends, int world) {
  std::stable_sort(ends.begin(), ends.end(), [](const RankEnd& a, const RankEnd& b) { return a.rank < b.rank; });
  const auto is_anothers = [&](const RankEnd& end) {
    return std::any_of(ends.begin(), ends.end(), [&](const RankEnd& other) {
      return other.rank != end.rank && !other.fault.message.empty() &&
             end.fault.message.starts_with(comm::failed_rank(other.rank, static_cast<size_t>(world)));
    });
  };
  std::map<std::string, int> finders;  // of each message
  for (const RankEnd& end : ends) ++finders[end.fault.message];
  GroupEnd out{.code = kExitDevice, .lines = {}};
  for (const RankEnd& end : ends) {
    if (out.code == kExitDevice) out.code = end.fault.code;
    const std::string& message = end.fault.message;
    const int found_by = std::exchange(finders[message], 0);
    if (message.empty() || found_by == 0 || is_anothers(end)) continue;
    out.lines.push_back(end.rank == 0 || found_by > 1 ? message : named(end.rank, world, message));
  }
  // None speaks for itself: then whoever has heard of it does.
  const auto said =
      std::find_if(ends.begin(), ends.end(), [](const RankEnd& end) { return !end.fault.message.empty(); });
  if (out.lines.empty() && said != ends.end()) out.lines.push_back(said->fault.message);
  return out;
}

std::string named(int rank, int world, const std::string& message) {
  const std::string name = fmt::format("rank {} of {}", rank, world);
  return message.starts_with(name) ? message : fmt::format("{}: {}", name, message);
}

}  // namespace tessera::app
