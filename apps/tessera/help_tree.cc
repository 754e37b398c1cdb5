// SPDX-License-Identifier: Apache-2.0
#include "help_tree.h"

#include <CLI/CLI.hpp>

namespace tessera::app {

namespace {

HelpOption read_option(const CLI::Option& option) {
  HelpOption out;
  for (const std::string& name : option.get_snames()) out.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) out.names.push_back("--" + name);
  if (option.get_items_expected_max() > 0) out.value = option.get_type_name();
  out.meaning = option.get_description();
  out.default_value = option.get_default_str();
  out.group = option.get_group();
  out.is_file = out.value == "FILE" || out.value == "DIR";
  if (option.get_positional()) out.value = option.get_name(true);
  out.is_file = out.is_file || out.value == "FILE" || out.value == "DIR" || out.value == "IN" || out.value == "OUT";
  return out;
}

HelpVerb read_verb(const CLI::App& app, const std::string& name) {
  HelpVerb verb{name, app.get_description(), app.get_footer(), {}, {}};
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_group().empty()) continue;  // hidden
    (option->get_positional() ? verb.positionals : verb.options).push_back(read_option(*option));
  }
  return verb;
}

}  // namespace

HelpTree read_help(const CLI::App& app) {
  HelpTree tree{read_verb(app, ""), {}};
  for (const CLI::App* verb : app.get_subcommands(nullptr)) tree.verbs.push_back(read_verb(*verb, verb->get_name()));
  return tree;
}

}  // namespace tessera::app
