// SPDX-License-Identifier: Apache-2.0
// tessera devices
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "backends/registry.h"
#include "base/env.h"
#include "base/strings.h"
#include "console.h"
#include "device/cpu_placement.h"
#include "device/gpu_diagnosis.h"
#include "device/machine.h"
#include "ops/planner.h"
#include "verb.h"

namespace tessera::app {

namespace {

// "0-3,8,10": in the given order, runs of neighbours as ranges.
std::string join_ranges(const std::vector<int>& numbers) {
  std::string text;
  for (size_t first = 0, last = 0; first < numbers.size(); first = last + 1) {
    for (last = first; last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1;) ++last;
    text += fmt::format("{}{}", text.empty() ? "" : ",", numbers[first]);
    if (last > first) text += fmt::format("-{}", numbers[last]);
  }
  return text;
}

// "0-3", a processor each; "0,8 1,9" where threads have several.
std::string join_places(const std::vector<std::vector<int>>& places) {
  std::vector<int> singles;
  std::string text;
  for (const std::vector<int>& place : places) {
    if (place.size() == 1) singles.push_back(place.front());
    text += fmt::format("{}{}", text.empty() ? "" : " ", join_ranges(place));
  }
  return singles.size() == places.size() ? join_ranges(singles) : text;
}

const char* plural(size_t count) {
  return count == 1 ? "" : "s";
}

// Nodes, cores, processors, and what a model with the default number of threads would do with them.
void describe_placement(const device::CpuPlacement& placement, std::string& text, nlohmann::ordered_json& out) {
  const device::CpuTopology& topology = placement.topology();
  const auto imagined = env_value("HWLOC_SYNTHETIC");
  if (imagined && !topology.is_imagined) {
    print_note(
        fmt::format("HWLOC_SYNTHETIC: hwloc can't read \"{}\", so this machine is used", printable(*imagined, 100)));
  }
  const device::PinPlan plan = placement.pins(0);
  out["placement"] = {{"nodes", topology.nodes},
                      {"cores", topology.num_cores},
                      {"processors", topology.processors.size()},
                      {"imagined", topology.is_imagined},
                      {"pinned", plan.places},
                      {"why_not_pinned", plan.why_not},
                      {"interleaved_nodes", placement.interleaved_nodes()}};
  const size_t nodes = std::max<size_t>(1, topology.nodes.size());
  text += fmt::format(
      "placement {}{} node{}, {} core{}, {} processor{}; threads {}; memory {}\n",
      topology.is_imagined ? "(HWLOC_SYNTHETIC, not this machine) " : "", nodes, plural(nodes), topology.num_cores,
      plural(static_cast<size_t>(topology.num_cores)), topology.processors.size(), plural(topology.processors.size()),
      plan.places.empty() ? "not pinned: " + plan.why_not : fmt::format("pinned to {}", join_places(plan.places)),
      placement.interleaved_nodes().empty()
          ? "where it is first touched"
          : fmt::format("interleaved over nodes {}", fmt::join(placement.interleaved_nodes(), ",")));
}

// Versions, GPUs and diagnoses as lines and as fields.
void describe_gpus(const device::GpuFacts& facts, std::string& text, nlohmann::ordered_json& out) {
  out["driver"] = {{"kernel_module", facts.files.module_version},
                   {"libcuda", facts.cuda.library_version},
                   {"cuda_version", facts.cuda.cuda_version},
                   {"init_code", facts.cuda.init_code},
                   {"open_error", facts.cuda.open_error}};
  out["gpus"] = nlohmann::ordered_json::array();
  if (!facts.files.module_version.empty()) {
    text += fmt::format("driver    {}{}\n", facts.files.module_version,
                        facts.cuda.cuda_version == 0 ? ""
                                                     : fmt::format(", CUDA {}.{}", facts.cuda.cuda_version / 1000,
                                                                   facts.cuda.cuda_version % 1000 / 10));
  }
  for (const device::GpuDevice& gpu : facts.cuda.devices) {
    out["gpus"].push_back({{"name", printable(gpu.name)},
                           {"compute_capability", fmt::format("{}.{}", gpu.compute_major, gpu.compute_minor)},
                           {"memory_bytes", gpu.memory_bytes}});
    text += fmt::format("gpu {:<5} {}, compute capability {}.{}, {}\n", out["gpus"].size() - 1, printable(gpu.name),
                        gpu.compute_major, gpu.compute_minor, format_bytes(gpu.memory_bytes));
  }
  if (facts.cuda.devices.empty()) text += "gpu       none that CUDA can use\n";
  out["diagnoses"] = nlohmann::ordered_json::array();
  for (const device::GpuDiagnosis& one : device::diagnose_gpus(facts)) {
    const char* weight = one.weight == device::GpuDiagnosis::Weight::kProblem ? "problem" : "warning";
    out["diagnoses"].push_back(
        {{"weight", weight}, {"finding", printable(one.finding, 2000)}, {"advice", printable(one.advice, 2000)}});
    text +=
        fmt::format("{:<9} {}\n          -> {}\n", weight, printable(one.finding, 2000), printable(one.advice, 2000));
  }
}

class Devices final : public Verb {
 public:
  explicit Devices(CLI::App& app)
      : command_(app.add_subcommand(
            "devices", "Show this machine, what each backend can do on it, and what keeps its GPUs from working")) {
    command_->footer(R"(
Of NVIDIA's driver only what is installed is asked; nothing needs to be. Each problem (GPUs can't be used) and warning
comes with what to do: driver and library that do not match, a driver too old for CUDA 13, a fabric manager that does
not run (CUDA error 802), a container without GPU access, missing device files, GPUs that can't reach each other's
memory, CUDA 12 libraries beside CUDA 13.)");
    command_->add_flag("--json", is_json_, "One JSON object");
  }
  CLI::App* command() const override { return command_; }

  int run() override {
    const device::Machine machine = device::probe_machine();
    // Throws for names that no backend or op has, as every verb would.
    const ops::Planner planner(backends::all_backends(), machine,
                               ops::parse_forced(env_value("TESSERA_FORCE").value_or("")));
    nlohmann::ordered_json out = {{"cpu", machine.cpu_name},
                                  {"cores", machine.num_cores},
                                  {"memory_total_bytes", machine.memory_total_bytes},
                                  {"memory_available_bytes", machine.memory_available_bytes},
                                  {"backends", nlohmann::ordered_json::array()}};
    std::string text =
        fmt::format("cpu       {}\ncores     {}\nmemory    {} available of {}\n", machine.cpu_name, machine.num_cores,
                    format_bytes(machine.memory_available_bytes), format_bytes(machine.memory_total_bytes));
    describe_placement(device::CpuPlacement(), text, out);
    const device::GpuFacts gpus = device::probe_gpus(env_value("LD_LIBRARY_PATH"));
    std::set<std::string> usable;
    for (const ops::Backend* backend : backends::all_backends()) {
      // A GPU's backend is judged by the first GPU.
      const bool lacks_gpu = backend->is_on_gpu && gpus.cuda.devices.empty();
      device::Machine judged = machine;
      if (backend->is_on_gpu && !lacks_gpu) judged.gpu = gpus.cuda.devices.front();
      std::string why_not = lacks_gpu ? "no GPU that CUDA can use" : "";
      const bool is_available = !lacks_gpu && ops::is_usable(*backend, judged, why_not);
      if (is_available) usable.insert(backend->name);
      if (!is_available && ops::is_named(*backend, machine)) {
        print_warning(fmt::format("TESSERA_BACKENDS names {}, which is not used: {}", backend->name, why_not));
      }
      out["backends"].push_back({{"name", backend->name},
                                 {"available", is_available},
                                 {"why_not", why_not},
                                 {"verified", std::string(ops::to_string(backend->verification))}});
      text +=
          fmt::format("backend   {:<8} {} (verified: {})\n", backend->name,
                      is_available ? "available" : "not available: " + why_not, ops::to_string(backend->verification));
    }
    if (usable.count("amx") > 0 && usable.count("avx512") > 0) {
      // docs/performance/cpu.md
      text += "hint      amx is made for long prompts; TESSERA_BACKENDS=avx512 may decode a single sequence faster\n";
    }
    describe_gpus(gpus, text, out);
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
