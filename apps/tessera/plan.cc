// SPDX-License-Identifier: Apache-2.0
// tessera plan: a model on a machine (plan_machine.h); tessera plan kernels
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "bench/plan/report.h"
#include "bench/shapes/published.h"
#include "console.h"
#include "model/config.h"
#include "numeric/nvfp4.h"
#include "plan_machine.h"
#include "usage.h"
#include "verb.h"

namespace tessera::app {

namespace {

using nlohmann::ordered_json;

ordered_json json_of(const bench::Estimate& estimate, const std::vector<bench::Kernel>& kernels) {
  ordered_json out = {{"us", estimate.us}, {"limit", estimate.limit.name}, {"kernel", estimate.kernel}};
  out["kernels"] = ordered_json::array();
  for (size_t i = 0; i < kernels.size(); ++i) {
    const bench::Prediction& p = estimate.parts[i];
    ordered_json terms;
    for (const bench::Term& term : p.terms) terms[term.name + "_us"] = term.us;
    out["kernels"].push_back({{"name", kernels[i].name},
                              {"us", p.us()},
                              {"limit", p.limit().name},
                              {"waves", p.waves},
                              {"fill_us", p.fill_us},
                              {"end_us", p.end_us},
                              {"terms", terms}});
  }
  return out;
}

ordered_json json_of(const bench::PlanRow& row) {
  ordered_json kernels = ordered_json::array();
  for (const bench::Kernel& k : row.kernels) {
    kernels.push_back({{"name", k.name},
                       {"tiles", k.tiles},
                       {"multiprocessors_of_tile", k.multiprocessors_of_tile},
                       {"tiles_at_once", k.tiles_at_once},
                       {"stages", k.stages},
                       {"ring_stages", k.ring_stages},
                       {"product_cycles", k.product_cycles},
                       {"issue_cycles", k.issue_cycles},
                       {"operand_bytes", k.operand_bytes},
                       {"copied_bytes", k.copied_bytes},
                       {"requested_bytes", k.requested_bytes},
                       {"store_cycles", k.store_cycles},
                       {"end_cycles", k.end_cycles},
                       {"memory_bytes", k.memory_bytes}});
  }
  return {{"shape", row.shape},
          {"tokens", row.tokens},
          {"form", row.form == bench::Form::kOurs ? "ours" : "ideal"},
          {"note", row.note},
          {"weight_bytes", row.weight_bytes},
          {"flops", row.flops},
          {"roofline_us", row.roofline_us},
          {"kernels", kernels},
          {"pessimistic", json_of(row.pessimistic, row.kernels)},
          {"optimistic", json_of(row.optimistic, row.kernels)}};
}

class Plan final : public Verb {
 public:
  explicit Plan(CLI::App& app)
      : command_(app.add_subcommand("plan", "Predict, without the hardware: memory, capacity and times on GPUs")),
        machine_(*command_) {
    command_->require_subcommand(0, 1);
    command_->footer(
        "\nWithout a sub-verb: how a model is cut over the GPUs of a machine, what each holds, how many tokens of "
        "context\n"
        "fit, the predicted times of a step and what bounds them, and the other plans. Plans that the layers can't "
        "compute\n"
        "yet are marked. docs/performance/several_gpus.md has the figures and how far off they are.\n"
        "Exit code 4 where nothing fits those GPUs: the report is the same, and stderr says what to try first.\n"
        "\nExamples:\n  tessera plan --model pro --gpus 8xh200 --context 128k --batch 24\n"
        "  tessera plan --gpus 2xh200 --dense nvfp4 --json plan.json");
    kernels_ = command_->add_subcommand("kernels", "Times of NVFP4 kernels on a GPU, from its figures");
    const CLI::Validator size(read_size, "");
    kernels_->add_option("--target", target_, "The GPU")->required()->type_name("b200|b300|rtx6000|gb10|h200|h100");
    kernels_->add_option("--model", model_, "Shapes: flash, pro, or a model's folder [flash]")
        ->type_name("flash|pro|DIR")
        ->check(not_empty("flash, pro or a folder"));
    kernels_->add_option("--tokens", tokens_, "Tokens per call, comma-separated [1,16,64,1024,4096]")
        ->delimiter(',')
        ->transform(size)
        ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
    kernels_->add_option("--square", squares_, "Also N outputs of N inputs for N tokens, comma-separated")
        ->delimiter(',')
        ->transform(size)
        ->check(CLI::Range(int64_t{64}, int64_t{1} << 17));
    kernels_->add_flag("--details", has_details_, "Each kernel's stage, and what each resource alone would take");
    PlanOutput::add_flag(*kernels_, json_file_, "Every term of every kernel");
    kernels_->footer(
        "\nA kernel's time is that of the resource that takes longest (products, issue, shared memory, the port into "
        "a\n"
        "multiprocessor, L2, memory, power, stores, latency), and what nothing hides before and behind it. \"ours\" "
        "are\n"
        "the kernels as written; \"ideal\" is a form that is not written. A range is over what nobody has measured.\n"
        "docs/performance/prediction.md says how far to trust it.\n"
        "\nExamples:\n  tessera plan kernels --target b200 --tokens 1,4096\n"
        "  tessera plan kernels --target h200 --model pro --json plan.json");
  }
  CLI::App* command() const override { return command_; }

  int run() override {
    if (kernels_->parsed()) {
      machine_.refuse_beside("kernels");
      return run_kernels();
    }
    if (machine_.is_asked()) return machine_.run();
    print_result(command_->help("tessera"));
    return kExitOk;
  }

 private:
  int run_kernels() {
    const bench::Target& target = bench::target_of(target_);
    for (const int64_t size : squares_) {  // others have no kernel, of which a row says how long it takes
      if (size % numeric::kNvfp4Block == 0) continue;
      fail_usage(fmt::format("--square: expected a multiple of {}, found {}", numeric::kNvfp4Block, size));
    }
    PlanOutput output(json_file_);
    std::vector<bench::PlanRow> rows;
    for (const int64_t size : squares_) {
      for (bench::PlanRow& row : bench::plan_rows({bench::square_shape(size)}, {size}, target)) {
        rows.push_back(std::move(row));
      }
    }
    const bool is_published = model_ == "flash" || model_ == "pro";
    const model::Config config = is_published ? bench::published_config(model_) : model::load_config(model_);
    for (bench::PlanRow& row :
         bench::plan_rows(bench::plan_shapes(is_published ? model_ : "model", config), tokens_, target)) {
      rows.push_back(std::move(row));
    }
    const auto published = bench::published_rows(target);
    output.write(bench::figures_table(target) + bench::published_table(target) + "\n" + bench::plan_table(rows) +
                     (has_details_ ? "\n" + bench::kernels_table(rows) : ""),
                 json_text(target, rows, published));
    return kExitOk;
  }

  static std::string json_text(const bench::Target& target, const std::vector<bench::PlanRow>& rows,
                               const std::vector<bench::PublishedRow>& published) {
    ordered_json out = {{"target", target.name}, {"gpu", target.gpu}, {"multiprocessors", target.multiprocessors}};
    for (const auto& [name, figure] : bench::figures_of(target)) {
      out["figures"].push_back({{"name", name},
                                {"low", figure.low},
                                {"high", figure.high},
                                {"unit", figure.unit},
                                {"source", figure.source}});
    }
    out["published"] = ordered_json::array();
    for (const bench::PublishedRow& row : published) {
      out["published"].push_back({{"what", row.what},
                                  {"source", row.source},
                                  {"petaflops", row.petaflops},
                                  {"sets_a_figure", row.sets_a_figure},
                                  {"prediction", json_of(row.prediction)}});
    }
    out["rows"] = ordered_json::array();
    for (const bench::PlanRow& row : rows) out["rows"].push_back(json_of(row));
    return out.dump(1) + "\n";
  }

  CLI::App *command_, *kernels_ = nullptr;
  PlanMachine machine_;
  std::string target_, model_ = "flash", json_file_;
  std::vector<int64_t> tokens_ = {1, 16, 64, 1024, 4096}, squares_;
  bool has_details_ = false;
};

}  // namespace

std::unique_ptr<Verb> add_plan(CLI::App& app) {
  return std::make_unique<Plan>(app);
}

}  // namespace tessera::app
