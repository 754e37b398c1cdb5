// SPDX-License-Identifier: Apache-2.0
// tessera man: the manual pages, made from what --help says.
#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "base/env.h"
#include "base/strings.h"
#include "console.h"
#include "help_tree.h"
#include "usage.h"
#include "verb.h"

namespace tessera::app {

namespace {

// Text for troff: hyphens as typed, backslashes shown, no line taken for a request.
std::string escaped(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool begins_line = i == 0 || text[i - 1] == '\n';
    if (begins_line && (text[i] == '.' || text[i] == '\'')) out += "\\&";
    if (text[i] == '\\') {
      out += "\\e";
    } else if (text[i] == '-') {
      out += "\\-";
    } else {
      out += text[i];
    }
  }
  return out;
}

std::string as_written(const std::string& text) {
  const size_t begin = text.find_first_not_of('\n');
  return begin == std::string::npos ? "" : ".PP\n.nf\n" + escaped(text.substr(begin)) + "\n.fi\n";
}

std::string entry(const HelpOption& option) {
  std::string names;
  for (const std::string& name : option.names) names += (names.empty() ? "\\fB" : "\\fR, \\fB") + escaped(name);
  std::string title = names;
  if (!option.value.empty()) title += (names.empty() ? "\\fI" : "\\fR \\fI") + escaped(option.value);
  std::string text = ".TP\n" + title + "\\fR\n" + escaped(option.meaning);
  if (!option.default_value.empty()) text += " [" + escaped(option.default_value) + "]";
  return text + "\n";
}

std::string synopsis(const HelpVerb& verb) {
  std::string text = fmt::format("\\fBtessera {}\\fR [options]", escaped(verb.name));
  for (const HelpOption& option : verb.positionals) text += " \\fI" + escaped(option.value) + "\\fR";
  return text + "\n";
}

std::string entries(const HelpVerb& verb) {
  std::string text;
  for (const HelpOption& option : verb.positionals) text += entry(option);
  for (const HelpOption& option : verb.options) text += entry(option);
  return text;
}

std::string verb_section(const HelpVerb& verb) {
  return fmt::format(".SS {}\n{}.\n.PP\n", escaped(verb.name), escaped(verb.meaning)) + synopsis(verb) + entries(verb) +
         as_written(verb.footer);
}

class Man final : public Verb {
 public:
  explicit Man(CLI::App& app) : app_(app), command_(app.add_subcommand("man", "Print the manual page")) {
    command_->add_option("VERB", verb_, "The page of this verb alone");
    command_->footer(R"(
Examples:
  tessera man | man -l -
  tessera man serve | man -l -)");
  }
  CLI::App* command() const override { return command_; }
  int run() override {
    const HelpTree help = read_help(app_);
    if (command_->count("VERB") > 0)
      return print_result(verb_page(help, verb_, TESSERA_VERSION)) ? kExitOk : kExitFailure;
    std::vector<std::pair<std::string, std::string>> environment;
    for (const EnvVariable& variable : env_variables()) environment.emplace_back(variable.name, variable.meaning);
    return print_result(manual_page(help, TESSERA_VERSION, environment)) ? kExitOk : kExitFailure;
  }

 private:
  const CLI::App& app_;
  CLI::App* command_;
  std::string verb_;
};

}  // namespace

std::string manual_page(const HelpTree& help, const std::string& version,
                        const std::vector<std::pair<std::string, std::string>>& environment) {
  std::string text = fmt::format(".TH TESSERA 1 \"\" \"tessera {}\" \"User Commands\"\n.SH NAME\ntessera \\- {}\n",
                                 version, escaped(help.program.meaning));
  text += ".SH SYNOPSIS\n\\fBtessera\\fR \\fIverb\\fR [options]\n.SH OPTIONS\n";
  for (const HelpOption& option : help.program.options) text += entry(option);
  text += ".SH VERBS\n";
  for (const HelpVerb& verb : help.verbs) text += verb_section(verb);
  text += ".SH ENVIRONMENT\n";
  for (const auto& [name, meaning] : environment)
    text += fmt::format(".TP\n\\fB{}\\fR\n{}\n", escaped(name), escaped(meaning));
  return text + ".SH EXIT CODES AND EXAMPLES\n" + as_written(help.program.footer);
}

std::string verb_page(const HelpTree& help, const std::string& name, const std::string& version) {
  for (const HelpVerb& verb : help.verbs) {
    if (verb.name != name) continue;
    return fmt::format(".TH TESSERA-{} 1 \"\" \"tessera {}\" \"User Commands\"\n.SH NAME\ntessera-{} \\- {}\n",
                       escaped(name), version, escaped(name), escaped(verb.meaning)) +
           ".SH SYNOPSIS\n" + synopsis(verb) + ".SH OPTIONS\n" + entries(verb) + ".SH NOTES\n" +
           as_written(verb.footer) + ".SH SEE ALSO\n.BR tessera (1)\n";
  }
  fail_usage(fmt::format("VERB: expected one of those in tessera --help, found \"{}\"", printable(name, 40)));
}

std::unique_ptr<Verb> add_man(CLI::App& app) {
  return std::make_unique<Man>(app);
}

}  // namespace tessera::app
