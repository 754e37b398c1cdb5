// SPDX-License-Identifier: Apache-2.0
#include "convert/plan.h"

#include <fmt/format.h>

#include <map>
#include <optional>
#include <set>

#include "base/error.h"
#include "base/strings.h"
#include "model/load_model.h"

namespace tessera::convert {

namespace {

using checkpoint::Checkpoint;
using checkpoint::LocatedTensor;
using model::StoredFormat;
using model::StoredTensor;
using model::WeightKind;
using model::WeightRow;
using numeric::kNvfp4Block;

constexpr size_t kMaxShards = 99'999;

bool is_nvfp4(StoredFormat format) {
  return format == StoredFormat::kNvfp4 || format == StoredFormat::kNvfp4Reciprocal;
}

class Planner {
 public:
  Planner(const Checkpoint& checkpoint, const model::Config& config, const PlanOptions& options)
      : checkpoint_(checkpoint), config_(config), options_(options) {}

  Plan take() {
    for (const WeightRow& row : model::make_weight_spec(config_, model::num_draft_layers(checkpoint_, config_))) {
      add_row(row);
    }
    for (const LocatedTensor& tensor : checkpoint_.tensors()) {
      if (!used_.contains(tensor.entry->name)) add_copy(tensor, tensor.entry->name);
    }
    check_names();
    cut_shards();
    return std::move(plan_);
  }

 private:
  void add_row(const WeightRow& row) {
    std::set<std::string> names;
    const StoredTensor stored = model::resolve_weight(checkpoint_, config_, row, names);
    const std::optional<Family> family = family_of(row.name);
    const bool is_chosen = family && options_.families.test(static_cast<size_t>(*family));
    const std::string& codes = stored.codes.entry->name;
    const bool is_map = row.kind == WeightKind::kLinear || row.kind == WeightKind::kPlain;
    const bool is_fused = is_map && !codes.ends_with(".weight") && !codes.ends_with(".weight_packed");
    const bool becomes_nvfp4 = family && (is_nvfp4(stored.format) || is_chosen);
    if (becomes_nvfp4) {
      used_.insert(names.begin(), names.end());
      add_matrix(row, *family, stored, names);
      return;
    }
    if (family) plan_.kept.push_back({row.name, stored.format, *family});
    plan_.keeps_fp8 |= stored.format == StoredFormat::kFp8Block;
    if (is_fused) return;  // experts that stay fused are copied with what no row asked for
    used_.insert(names.begin(), names.end());
    // PATH.weight and what belongs to it become NAME.weight and so on; other tensors have the whole name.
    const size_t path_bytes = is_map ? codes.rfind(".weight") : codes.size();
    for (const std::string& name : names) add_copy(*checkpoint_.find(name), row.name + name.substr(path_bytes));
  }

  void add_copy(const LocatedTensor& tensor, const std::string& name, Treatment treatment = Treatment::kCopy) {
    if (!tensor.entry->dtype) {
      fail_data(tensor.file->path(), fmt::format("tensor {}", name), "a known dtype", tensor.entry->dtype_text);
    }
    if (treatment == Treatment::kReciprocal &&
        (tensor.entry->dtype != DType::kF32 || tensor.entry->shape.num_elements() != 1)) {
      fail_data(tensor.file->path(), fmt::format("tensor {}", printable(tensor.entry->name)), "one F32 value",
                fmt::format("{} {}", tensor.entry->dtype_text, tensor.entry->shape.to_string()));
    }
    Job job;
    job.treatment = treatment;
    job.source = tensor;
    job.first_tensor = plan_.tensors.size();
    job.output_bytes = tensor.entry->num_bytes;
    plan_.tensors.push_back(
        {name, *tensor.entry->dtype, treatment == Treatment::kReciprocal ? Shape{} : tensor.entry->shape});
    plan_.jobs.push_back(std::move(job));
  }

  void add_matrix(const WeightRow& row, Family family, const StoredTensor& stored, const std::set<std::string>& names) {
    const int64_t rows = row.shape[0], cols = row.shape[1];
    if (cols % kNvfp4Block != 0) {
      fail(ErrorCode::kUnsupported,
           fmt::format("{}: tensor {}: expected input features in multiples of {} for NVFP4, found {}",
                       printable(stored.codes.file->path()), printable(stored.codes.entry->name), kNvfp4Block, cols));
    }
    const Treatment treatment = is_nvfp4(stored.format)                 ? Treatment::kAsIs
                                : stored.format == StoredFormat::kMxfp4 ? Treatment::kExact
                                                                        : Treatment::kRound;
    const uint64_t bytes = static_cast<uint64_t>(rows * cols / 2 + rows * cols / kNvfp4Block) + sizeof(float);
    const PlannedMatrix matrix{row.name, family, rows, cols, stored};
    Job* job = treatment == Treatment::kAsIs ? nullptr : partner_of(row.name, treatment);
    if (job == nullptr) {
      plan_.jobs.emplace_back();
      job = &plan_.jobs.back();
      job->treatment = treatment;
    }
    job->matrices.push_back(matrix);
    job->output_bytes += bytes;
    if (row.name.ends_with(".w1")) last_gate_ = {row.name, plan_.jobs.size() - 1};
    for (const std::string& name : names) {
      const LocatedTensor& tensor = *checkpoint_.find(name);
      if (name.ends_with(".input_scale")) add_copy(tensor, row.name + ".input_scale");
      if (name.ends_with(".input_global_scale")) {
        add_copy(tensor, row.name + ".input_scale", Treatment::kReciprocal);
      }
      plan_.has_input_scale |= name.ends_with(".input_scale") || name.ends_with(".input_global_scale");
    }
  }

  // The job of w1 for w3 of the same expert, where both are made in the same way: one multiply reads both, and some
  // programs know only one tensor scale for it.
  Job* partner_of(const std::string& name, Treatment treatment) {
    if (!name.ends_with(".w3") || last_gate_.name != name.substr(0, name.size() - 1) + "1") return nullptr;
    Job& job = plan_.jobs[last_gate_.job];
    return job.treatment == treatment ? &job : nullptr;
  }

  // Matrices get their tensors now that jobs are whole; then no name may be there twice.
  void check_names() {
    for (Job& job : plan_.jobs) {
      if (job.matrices.empty()) continue;
      job.first_tensor = plan_.tensors.size();
      for (const PlannedMatrix& m : job.matrices) {
        plan_.tensors.push_back({m.name + ".weight", DType::kU8, {m.rows, m.cols / 2}});
        plan_.tensors.push_back({m.name + ".weight_scale", DType::kF8E4M3, {m.rows, m.cols / kNvfp4Block}});
        plan_.tensors.push_back({m.name + ".weight_scale_2", DType::kF32, {}});
      }
    }
    std::set<std::string_view> names;
    for (const checkpoint::TensorSpec& tensor : plan_.tensors) {
      if (!names.insert(tensor.name).second) {
        fail_data(checkpoint_.directory(), fmt::format("tensor {}", printable(tensor.name)),
                  "to come from one place of the source", "two (one of them under another name)");
      }
    }
  }

  void cut_shards() {
    for (size_t j = 0; j < plan_.jobs.size(); ++j) {
      const uint64_t bytes = plan_.jobs[j].output_bytes;
      plan_.output_bytes += bytes;
      const bool fits = !plan_.shards.empty() && plan_.shards.back().bytes <= options_.max_shard_bytes &&
                        bytes <= options_.max_shard_bytes - plan_.shards.back().bytes;
      if (!fits) plan_.shards.push_back({"", j, j, 0});
      plan_.shards.back().job_end = j + 1;
      plan_.shards.back().bytes += bytes;
    }
    const size_t count = plan_.shards.size();
    if (count > kMaxShards) {
      fail(ErrorCode::kInvalidArgument,
           fmt::format("shard size {}: expected at most {} shards, found {}; choose larger ones",
                       format_bytes(options_.max_shard_bytes), kMaxShards, count));
    }
    for (size_t i = 0; i < count; ++i) {
      plan_.shards[i].file =
          count == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, count);
    }
  }

  struct Gate {
    std::string name;
    size_t job = 0;
  };
  const Checkpoint& checkpoint_;
  const model::Config& config_;
  const PlanOptions& options_;
  std::set<std::string> used_;
  Gate last_gate_;
  Plan plan_;
};

}  // namespace

Plan make_plan(const Checkpoint& checkpoint, const model::Config& config, const PlanOptions& options) {
  return Planner(checkpoint, config, options).take();
}

}  // namespace tessera::convert
