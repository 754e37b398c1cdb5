// SPDX-License-Identifier: Apache-2.0
// tessera completion: what a shell needs to complete verbs and flags.
#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "base/strings.h"
#include "console.h"
#include "help_tree.h"
#include "usage.h"
#include "verb.h"

namespace tessera::app {

namespace {

std::string join_names(const std::vector<HelpOption>& options) {
  std::string text;
  for (const HelpOption& option : options) {
    for (const std::string& name : option.names) text += (text.empty() ? "" : " ") + name;
  }
  return text;
}

bool takes_file(const HelpVerb& verb) {
  for (const HelpOption& option : verb.positionals) {
    if (option.is_file) return true;
  }
  return false;
}

// The flags of all verbs whose value is a file, each once.
std::string file_flags(const HelpTree& help, const char* separator) {
  std::vector<std::string> names;
  for (const HelpVerb& verb : help.verbs) {
    for (const HelpOption& option : verb.options) {
      for (const std::string& name : option.names) {
        if (option.is_file && std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
      }
    }
  }
  return fmt::format("{}", fmt::join(names, separator));
}

std::string bash_script(const HelpTree& help) {
  std::string verbs, cases;
  for (const HelpVerb& verb : help.verbs) {
    verbs += (verbs.empty() ? "" : " ") + verb.name;
    cases +=
        fmt::format("    {}) flags='{}' files={} ;;\n", verb.name, join_names(verb.options), takes_file(verb) ? 1 : 0);
  }
  std::string script = R"(# bash completion of tessera; to use it: source <(tessera completion bash)
_tessera() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} flags= files=0
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W '@VERBS@ @FLAGS@' -- "$word"))
    return
  fi
  case "$before" in
    @FILEFLAGS@) COMPREPLY=($(compgen -f -- "$word")); return ;;
  esac
  case "${COMP_WORDS[1]}" in
@CASES@  esac
  if [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$word"))
  elif [ "$files" = 1 ]; then
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}
complete -o filenames -F _tessera tessera
)";
  const auto put = [&](const std::string& place, const std::string& text) {
    script.replace(script.find(place), place.size(), text);
  };
  put("@VERBS@", verbs);
  put("@FLAGS@", join_names(help.program.options));
  put("@FILEFLAGS@", file_flags(help, "|"));
  put("@CASES@", cases);
  return script;
}

// Text inside single quotes of a shell. zsh's specifications also give brackets and colons a meaning.
std::string quoted(const std::string& text, const std::string& specials = "") {
  std::string out;
  for (const char c : text) {
    if (c == '\'') {
      out += "'\\''";
    } else {
      if (specials.find(c) != std::string::npos) out += '\\';
      out += c;
    }
  }
  return out;
}

std::string zsh_script(const HelpTree& help) {
  std::string script =
      "#compdef tessera\n# zsh completion of tessera; put it into a folder of $fpath as _tessera\n"
      "_tessera() {\n  local -a verbs\n  verbs=(\n";
  for (const HelpVerb& verb : help.verbs) script += fmt::format("    '{}:{}'\n", verb.name, quoted(verb.meaning, ":"));
  script += "  )\n  if (( CURRENT == 2 )); then\n    _describe verb verbs\n    return\n  fi\n  case $words[2] in\n";
  for (const HelpVerb& verb : help.verbs) {
    script += fmt::format("    {})\n      _arguments", verb.name);
    for (const HelpOption& option : verb.options) {
      const std::string action = option.value.empty() ? "" : option.is_file ? ":file:_files" : ":value:";
      for (const std::string& name : option.names)
        script += fmt::format(" \\\n        '{}[{}]{}'", name, quoted(option.meaning, "[]:"), action);
    }
    script += fmt::format(" \\\n        '*:argument:{}'\n      ;;\n", takes_file(verb) ? "_files" : "");
  }
  // Loaded from $fpath the file is the function's body; sourced, it registers the function.
  return script +
         "  esac\n}\nif [ \"$funcstack[1]\" = _tessera ]; then\n  _tessera \"$@\"\nelse\n  compdef _tessera "
         "tessera\nfi\n";
}

std::string fish_script(const HelpTree& help) {
  std::string script =
      "# fish completion of tessera; put it into ~/.config/fish/completions/tessera.fish\n"
      "complete -c tessera -f\n";
  for (const HelpVerb& verb : help.verbs) {
    script += fmt::format("complete -c tessera -n __fish_use_subcommand -a {} -d '{}'\n", verb.name,
                          quoted(verb.meaning, "\\"));
    const std::string inside = fmt::format("complete -c tessera -n '__fish_seen_subcommand_from {}'", verb.name);
    if (takes_file(verb)) script += inside + " -F\n";
    for (const HelpOption& option : verb.options) {
      std::string names;
      for (const std::string& name : option.names)
        names += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
      script += fmt::format("{}{}{} -d '{}'\n", inside, names,
                            option.value.empty() ? ""
                            : option.is_file     ? " -r -F"
                                                 : " -x",
                            quoted(option.meaning, "\\"));
    }
  }
  return script;
}

class Completion final : public Verb {
 public:
  explicit Completion(CLI::App& app)
      : app_(app), command_(app.add_subcommand("completion", "Print a completion script for a shell")) {
    command_->add_option("SHELL", shell_, "bash, zsh or fish")->required();
    command_->footer(R"(
Examples:
  source <(tessera completion bash)
  tessera completion zsh > ~/.zfunc/_tessera
  tessera completion fish > ~/.config/fish/completions/tessera.fish)");
  }
  CLI::App* command() const override { return command_; }
  int run() override { return print_result(completion_script(read_help(app_), shell_)) ? kExitOk : kExitFailure; }

 private:
  const CLI::App& app_;
  CLI::App* command_;
  std::string shell_;
};

}  // namespace

std::string completion_script(const HelpTree& help, const std::string& shell) {
  if (shell == "bash") return bash_script(help);
  if (shell == "zsh") return zsh_script(help);
  if (shell == "fish") return fish_script(help);
  fail_usage(fmt::format("SHELL: expected bash, zsh or fish, found \"{}\"", printable(shell, 40)));
}

std::unique_ptr<Verb> add_completion(CLI::App& app) {
  return std::make_unique<Completion>(app);
}

}  // namespace tessera::app
