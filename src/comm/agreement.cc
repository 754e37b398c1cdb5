// SPDX-License-Identifier: Apache-2.0
#include "comm/agreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <vector>

#include "base/error.h"
#include "base/strings.h"
#include "comm/message.h"

namespace tessera::comm {

namespace {

constexpr size_t kMostShown = 200;  // characters of a value

std::vector<uint8_t> packed(std::span<const Fact> facts) {
  std::vector<uint8_t> bytes;
  for (const Fact& fact : facts) {
    for (const std::string& text : {fact.name, fact.value}) {
      append_u32(bytes, static_cast<uint32_t>(text.size()));
      bytes.insert(bytes.end(), text.begin(), text.end());
    }
  }
  return bytes;
}

std::string text_at(std::span<const uint8_t> bytes, size_t& at) {
  const size_t size = read_u32(bytes, at);
  if (size > bytes.size() - at) fail_data("message", "facts of a rank", fmt::format("{} bytes", size), "fewer");
  const auto begin = bytes.begin() + static_cast<ptrdiff_t>(at);
  at += size;
  return {begin, begin + static_cast<ptrdiff_t>(size)};
}

std::vector<Fact> unpacked(std::span<const uint8_t> bytes) {
  std::vector<Fact> facts;
  for (size_t at = 0; at < bytes.size();) {
    Fact fact;
    fact.name = text_at(bytes, at);
    fact.value = text_at(bytes, at);
    facts.push_back(std::move(fact));
  }
  return facts;
}

// Every rank finds it by itself: so none tells the others, for whom that would be a rank that failed.
[[noreturn]] void refuse(Bootstrap& bootstrap, const std::string& why) {
  bootstrap.all_gather({});
  bootstrap.leave();
  fail(ErrorCode::kInvalidArgument, why);
}

}  // namespace

void agree(Bootstrap& bootstrap, std::span<const Fact> facts) {
  const std::vector<std::vector<uint8_t>> all = bootstrap.all_gather(packed(facts));
  const std::vector<Fact> expected = unpacked(all.front());
  // Where one rank has a fact that the other lacks, kernels of an op that only one of them has for example.
  const Fact nothing{"", "nothing"};
  for (size_t r = 1; r < all.size(); ++r) {
    const std::vector<Fact> found = unpacked(all[r]);
    for (size_t i = 0; i < std::max(expected.size(), found.size()); ++i) {
      const Fact& first = i < expected.size() ? expected[i] : nothing;
      const Fact& second = i < found.size() ? found[i] : nothing;
      if (first.name == second.name && first.value == second.value) continue;
      const bool is_same = first.name == second.name;
      const auto shown = [&](const Fact& fact) {
        return printable(is_same || fact.name.empty() ? fact.value : fact.name + " " + fact.value, kMostShown);
      };
      refuse(bootstrap, fmt::format("rank {} of {} differs from rank 0 in {}: expected \"{}\", found \"{}\"", r,
                                    all.size(), printable(first.name.empty() ? second.name : first.name, kMostShown),
                                    shown(first), shown(second)));
    }
  }
}

void differ(Bootstrap& bootstrap, const Fact& fact, const std::string& advice) {
  std::map<std::string, size_t> holders;
  const std::vector<std::vector<uint8_t>> all =
      bootstrap.all_gather({reinterpret_cast<const uint8_t*>(fact.value.data()), fact.value.size()});
  for (size_t r = 0; r < all.size(); ++r) {
    const auto [holder, is_new] = holders.emplace(std::string(all[r].begin(), all[r].end()), r);
    if (is_new) continue;
    refuse(bootstrap, fmt::format("ranks {} and {} of {} have the same {} \"{}\": {}", holder->second, r, all.size(),
                                  fact.name, printable(holder->first, kMostShown), advice));
  }
}

}  // namespace tessera::comm
