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

// The one of `names` that is a slip or two away; empty: none is.
std::string similar(const std::string& word, const std::vector<std::string>& names) {
  std::string found;
  size_t least = kMostSlips + 1;
  if (word.size() > kMostShown) return found;
  for (const std::string& name : names) {
    const size_t slips = slips_between(word, name);
    if (slips < least) found = name, least = slips;
  }
  return found;
}

std::vector<std::string> flags_of(const CLI::App& verb) {
  std::vector<std::string> flags;
  for (const CLI::Option* option : verb.get_options()) {
    for (const std::string& name : option->get_lnames()) flags.push_back("--" + name);
  }
  return flags;
}

std::vector<std::string> verbs_of(const CLI::App& verb) {
  std::vector<std::string> names;
  for (const CLI::App* one : verb.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(one->get_name());
  }
  return names;
}

// What `verb` did not take: a flag that it does not have, by itself, since CLI11 counts the words behind it as
// unexpected too; or a word that is nearly a verb. Empty: neither.
std::string unknown_word(const CLI::App& app, const CLI::App& verb) {
  const std::vector<std::string> words = app.remaining(true);
  for (const std::string& word : words) {
    if (word.size() < 2 || word[0] != '-') continue;
    const std::string flag = word.substr(0, word.find('=')), other = similar(flag, flags_of(verb));
    return fmt::format("unknown flag {}{}", printable(flag, kMostShown),
                       other.empty() ? "" : fmt::format(", did you mean {}?", other));
  }
  for (const std::string& word : words) {
    const std::string other = similar(word, verbs_of(verb));
    if (!other.empty()) return fmt::format("unknown verb {}, did you mean {}?", printable(word, kMostShown), other);
  }
  return "";
}

// CLI11's "Could not convert: --ranks = many", with what is expected; empty: it says something else.
std::string unread_value(const CLI::App& verb, std::string_view what) {
  constexpr std::string_view kBegin = "Could not convert: ", kIs = " = ";
  const size_t is = what.find(kIs);
  if (!what.starts_with(kBegin) || is == std::string_view::npos) return "";
  const std::string name(what.substr(kBegin.size(), is - kBegin.size()));
  const CLI::Option* option = verb.get_option_no_throw(name);
  std::string type = option == nullptr ? "" : option->get_type_name();
  if (type == "N" || type == "INT" || type == "UINT") type = "a whole number";
  if (type.empty() || type == "S" || type == "FLOAT") type = "a number";
  return fmt::format("{}: expected {}, found \"{}\"", name, type, printable(what.substr(is + kIs.size()), kMostShown));
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
  // What is missing may be what is misspelt.
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr ||
      dynamic_cast<const CLI::RequiredError*>(&error) != nullptr) {
    if (std::string word = unknown_word(app, *verb); !word.empty()) what = std::move(word);
  }
  if (std::string unread = unread_value(*verb, what); !unread.empty()) what = std::move(unread);
  if (!names.empty()) return fmt::format("{} (try tessera {}--help)", what, names);
  return fmt::format("{}; verbs: {} (try tessera --help)", what, fmt::join(verbs_of(app), ", "));
}

}  // namespace tessera::app
