// SPDX-License-Identifier: Apache-2.0
#pragma once
// What --help says, as plain data: completion scripts and the man page are made from it, so all three agree.
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace tessera::app {

struct HelpOption {
  std::vector<std::string> names;  // "-h", "--help"; empty for a positional argument
  std::string value;               // "TEXT", "DIR"; empty for a flag
  std::string meaning, default_value, group;
  bool is_file = false;  // the value names a file or folder
};

struct HelpVerb {
  std::string name, meaning, footer;  // no name: the program itself
  std::vector<HelpOption> options, positionals;
};

struct HelpTree {
  HelpVerb program;
  std::vector<HelpVerb> verbs;
};

HelpTree read_help(const CLI::App& app);

// A completion script for "bash", "zsh" or "fish". Throws kInvalidArgument for another shell.
std::string completion_script(const HelpTree& help, const std::string& shell);

// The manual page tessera(1) in the man macros. `environment`: (name, meaning) of each variable.
std::string manual_page(const HelpTree& help, const std::string& version,
                        const std::vector<std::pair<std::string, std::string>>& environment);
// That of one verb, tessera-NAME(1). Throws kInvalidArgument for an unknown one.
std::string verb_page(const HelpTree& help, const std::string& name, const std::string& version);

}  // namespace tessera::app
