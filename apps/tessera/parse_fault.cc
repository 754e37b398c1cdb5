// SPDX-License-Identifier: Apache-2.0
#include "parse_fault.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <numeric>
#include <vector>

#include "base/strings.h"

namespace tessera::app {

namespace {

constexpr size_t kMostShown = 60, kMostSlips = 2;

// Letters left out, put in, changed or swapped with the next one.
size_t slips_between(std::string_view a, std::string_view b) {
  std::vector<size_t> two_before, before(b.size() + 1), row(b.size() + 1);
  std::iota(before.begin(), before.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({before[j] + 1, row[j - 1] + 1, before[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      const bool are_swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (are_swapped) row[j] = std::min(row[j], two_before[j - 2] + 1);
    }
    two_before = before;
    before = row;
  }
  return before.back();
}

// The flag of `verb` that is a slip or two away; empty: none is.
std::string similar_flag(const CLI::App& verb, const std::string& word) {
  std::string found;
  size_t least = kMostSlips + 1;
  for (const CLI::Option* option : verb.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      const size_t slips = slips_between(word, "--" + name);
      if (slips < least) found = "--" + name, least = slips;
    }
  }
  return found;
}

// CLI11 counts the words behind a flag that it does not know as unexpected too.
std::string unknown_flag(const CLI::App& app, const CLI::App& verb) {
  for (const std::string& word : app.remaining(true)) {
    if (word.size() < 2 || word[0] != '-') continue;
    const std::string flag = word.substr(0, word.find('='));
    const std::string similar = flag.size() <= kMostShown ? similar_flag(verb, flag) : "";
    return fmt::format("unknown flag {}{}", printable(flag, kMostShown),
                       similar.empty() ? "" : fmt::format(", did you mean {}?", similar));
  }
  return "";
}

}  // namespace

std::string parse_fault(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* verb = &app;
  std::string names;  // as far as they were understood: bench serve, say
  while (!verb->get_subcommands().empty()) {
    verb = verb->get_subcommands().front();
    names += verb->get_name() + ' ';
  }
  std::string what = error.what();
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr) {
    if (std::string flag = unknown_flag(app, *verb); !flag.empty()) what = std::move(flag);
  }
  if (!names.empty()) return fmt::format("{} (try tessera {}--help)", what, names);
  std::vector<std::string> verbs;
  for (const CLI::App* one : app.get_subcommands([](const CLI::App*) { return true; })) {
    verbs.push_back(one->get_name());
  }
  return fmt::format("{}; verbs: {} (try tessera --help)", what, fmt::join(verbs, ", "));
}

}  // namespace tessera::app
