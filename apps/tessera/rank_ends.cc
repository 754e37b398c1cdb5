// SPDX-License-Identifier: Apache-2.0
#include "rank_ends.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <set>

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
  for (size_t at = 0; at < bytes.size();) {
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
  // As the bootstrap tells others of a fault.
  const auto is_anothers = [&](const std::string& message) {
    return std::any_of(ends.begin(), ends.end(), [&](const RankEnd& other) {
      const std::string& words = other.fault.message;
      return !words.empty() && message.starts_with(fmt::format("rank {} of {} failed: {}", other.rank, world, words));
    });
  };
  GroupEnd out{.code = kExitDevice, .lines = {}};
  std::set<std::string> said;
  for (const RankEnd& end : ends) {
    if (out.code == kExitDevice) out.code = end.fault.code;
    const std::string& message = end.fault.message;
    if (message.empty() || is_anothers(message) || !said.insert(message).second) continue;
    out.lines.push_back(end.rank == 0 ? message : named(end.rank, world, message));
  }
  return out;
}

std::string named(int rank, int world, const std::string& message) {
  const std::string name = fmt::format("rank {} of {}", rank, world);
  return message.starts_with(name) ? message : fmt::format("{}: {}", name, message);
}

}  // namespace tessera::app
