// SPDX-License-Identifier: Apache-2.0
// tessera devices
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "backends/registry.h"
#include "base/strings.h"
#include "console.h"
#include "device/machine.h"
#include "verb.h"

namespace tessera::app {

namespace {

class Devices final : public Verb {
 public:
  explicit Devices(CLI::App& app)
      : command_(app.add_subcommand("devices", "Show this machine, and what each backend can do on it")) {
    command_->add_flag("--json", is_json_, "One JSON object");
  }
  CLI::App* command() const override { return command_; }

  int run() override {
    const device::Machine machine = device::probe_machine();
    nlohmann::ordered_json out = {{"cpu", machine.cpu_name},
                                  {"cores", machine.num_cores},
                                  {"memory_total_bytes", machine.memory_total_bytes},
                                  {"memory_available_bytes", machine.memory_available_bytes},
                                  {"backends", nlohmann::ordered_json::array()}};
    std::string text =
        fmt::format("cpu       {}\ncores     {}\nmemory    {} available of {}\n", machine.cpu_name, machine.num_cores,
                    format_bytes(machine.memory_available_bytes), format_bytes(machine.memory_total_bytes));
    for (const ops::Backend* backend : backends::all_backends()) {
      std::string why_not;
      const bool is_available = backend->available(machine, why_not);
      out["backends"].push_back({{"name", backend->name},
                                 {"available", is_available},
                                 {"why_not", why_not},
                                 {"verified", std::string(ops::to_string(backend->verification))}});
      text +=
          fmt::format("backend   {:<8} {} (verified: {})\n", backend->name,
                      is_available ? "available" : "not available: " + why_not, ops::to_string(backend->verification));
    }
    print_result(is_json_ ? out.dump() + "\n" : text);
    return kExitOk;
  }

 private:
  CLI::App* command_;
  bool is_json_ = false;
};

}  // namespace

std::unique_ptr<Verb> add_devices(CLI::App& app) {
  return std::make_unique<Devices>(app);
}

}  // namespace tessera::app
