// SPDX-License-Identifier: Apache-2.0
// tessera version
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "backends/registry.h"
#include "commit.h"
#include "console.h"
#include "verb.h"

namespace tessera::app {

namespace {

class Version final : public Verb {
 public:
  explicit Version(CLI::App& app) : command_(app.add_subcommand("version", "Print version, commit and build")) {
    command_->add_flag("--json", is_json_, "One JSON object");
  }
  CLI::App* command() const override { return command_; }

  int run() override {
    std::vector<std::string> names;
    for (const ops::Backend* backend : backends::all_backends()) names.emplace_back(backend->name);
    if (is_json_) {
      const nlohmann::ordered_json out = {{"version", TESSERA_VERSION},
                                          {"commit", TESSERA_COMMIT},
                                          {"build", TESSERA_BUILD_TYPE},
                                          {"compiler", __VERSION__},
                                          {"backends", names}};
      print_result(out.dump() + "\n");
    } else {
      print_result(fmt::format("tessera {}\ncommit    {}\nbuild     {}\ncompiler  {}\nbackends  {}\n", TESSERA_VERSION,
                               TESSERA_COMMIT, TESSERA_BUILD_TYPE, __VERSION__, fmt::join(names, " ")));
    }
    return kExitOk;
  }

 private:
  CLI::App* command_;
  bool is_json_ = false;
};

}  // namespace

std::unique_ptr<Verb> add_version(CLI::App& app) {
  return std::make_unique<Version>(app);
}

}  // namespace tessera::app
