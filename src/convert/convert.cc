// SPDX-License-Identifier: Apache-2.0
#include "convert/convert.h"

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "base/strings.h"
#include "checkpoint/checkpoint.h"
#include "convert/config_json.h"
#include "convert/job_runner.h"
#include "convert/report.h"
#include "convert/write_whole.h"

namespace tessera::convert {

namespace fs = std::filesystem;

namespace {

constexpr uint64_t kMaxConfigBytes = 16 << 20;
constexpr uint64_t kMaxSmallFileBytes = 64 << 20;
constexpr uint64_t kSpareDiskBytes = 16 << 20;  // for the small files
// Changes when the same source and options would give other bytes.
constexpr int kOutputRevision = 1;

std::string join(const std::string& folder, const std::string& name) {
  return (fs::path(folder) / name).string();
}

// Everything that the output's bytes depend on, hashed. Files are told by name, size, time of change, and their
// tensors.
std::string fingerprint_of(const checkpoint::Checkpoint& checkpoint, const std::string& config,
                           const Options& options) {
  checkpoint::TensorHasher hasher;
  const auto add = [&](const std::string& text) { hasher.update((text + "\n").data(), text.size() + 1); };
  add(fmt::format("{} {} {} {} {} {}", kOutputRevision, options.version, to_string(options.families),
                  static_cast<int>(options.rule), options.max_shard_bytes, options.allow_inexact));
  add(config);
  const checkpoint::SafetensorsFile* file = nullptr;
  for (const checkpoint::LocatedTensor& tensor : checkpoint.tensors()) {
    if (tensor.file != file) {
      file = tensor.file;
      std::error_code error;
      add(fmt::format("{} {} {}", fs::path(file->path()).filename().string(), fs::file_size(file->path(), error),
                      fs::last_write_time(file->path(), error).time_since_epoch().count()));
    }
    add(fmt::format("{} {} {} {}", tensor.entry->name, tensor.entry->dtype_text, tensor.entry->shape.to_string(),
                    tensor.entry->file_offset));
  }
  return hasher.hex();
}

void check_disk(const std::string& out, uint64_t needed) {
  std::error_code error;
  const fs::space_info space = fs::space(out, error);
  if (error || space.available >= needed) return;
  fail(ErrorCode::kResourceExhausted,
       fmt::format("{}: does not fit: {} are to be written, the disk has {} free; {} are missing", printable(out),
                   format_bytes(needed), format_bytes(space.available), format_bytes(needed - space.available)));
}

void write_index(const std::string& out, const Plan& plan) {
  if (plan.shards.size() == 1) return;
  nlohmann::json map = nlohmann::json::object();
  for (const PlannedShard& shard : plan.shards) {
    for (size_t j = shard.job_begin; j < shard.job_end; ++j) {
      const Job& job = plan.jobs[j];
      for (size_t t = 0; t < num_tensors(job); ++t) map[plan.tensors[job.first_tensor + t].name] = shard.file;
    }
  }
  const nlohmann::ordered_json index = {{"metadata", {{"total_size", plan.output_bytes}}},
                                        {"weight_map", std::move(map)}};
  write_whole(join(out, checkpoint::kIndexName), index.dump(1) + "\n");
}

// The tokenizer, generation_config.json, licence and the like: regular files at the top of the folder that are neither
// weights nor written anew.
std::vector<std::string> small_files(const std::string& in, LogSink* log) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& item : fs::directory_iterator(in, error)) {
    const std::string name = item.path().filename().string();
    const bool is_ours = name == "config.json" || name == "hf_quant_config.json" || name == checkpoint::kHashesName ||
                         name == kReportJsonName || name == kReportSvgName;
    const bool is_weights = name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json");
    if (is_ours || is_weights || name.starts_with('.') || !fs::is_regular_file(item.path(), error)) continue;
    if (fs::file_size(item.path(), error) > kMaxSmallFileBytes) {
      if (log != nullptr) {
        log->write(LogLevel::kWarning,
                   fmt::format("{} is not copied: larger than {}", printable(name), format_bytes(kMaxSmallFileBytes)));
      }
      continue;
    }
    names.push_back(name);
  }
  return names;
}

class Conversion {
 public:
  Conversion(std::string in, std::string out, const Options& options, LogSink* log, ProgressSink* progress,
             const std::atomic<bool>* is_cancelled)
      : in_(std::move(in)),
        out_(std::move(out)),
        options_(options),
        log_(log),
        progress_(progress),
        is_cancelled_(is_cancelled),
        config_path_(join(in_, "config.json")),
        config_(model::load_config(in_)),
        config_text_(read_file(config_path_, kMaxConfigBytes)),
        checkpoint_(checkpoint::Checkpoint::open(in_)),
        plan_(make_plan(checkpoint_, config_, {options.families, options.max_shard_bytes})) {}

  Result run() {
    std::error_code error;
    if (fs::equivalent(in_, out_, error)) {
      fail(ErrorCode::kInvalidArgument, fmt::format("{}: is the source; name another folder", printable(out_)));
    }
    // Those that can't be read are found before the hours that shards take.
    small_files_ = small_files(in_, log_);
    for (const std::string& name : small_files_) File::open_read(join(in_, name));
    configs_ = converted_configs(config_text_, config_path_, plan_, options_.version);
    finished_.resize(plan_.shards.size());
    if (options_.is_trial) {
      make_shards(nullptr);
    } else {
      WorkFolder folder(out_, options_.existing, fingerprint_of(checkpoint_, config_text_, options_));
      uint64_t missing_bytes = kSpareDiskBytes;
      for (size_t s = 0; s < plan_.shards.size(); ++s) {
        finished_[s] = folder.finished(plan_.shards[s]);
        result_.num_resumed_shards += finished_[s] ? 1 : 0;
        if (!finished_[s]) missing_bytes += plan_.shards[s].bytes;
      }
      check_disk(out_, missing_bytes);
      make_shards(&folder);
      publish(folder);
    }
    return result();
  }

 private:
  // Makes the shards that are not finished.
  void make_shards(const WorkFolder* folder) {
    std::vector<size_t> shards, jobs;
    uint64_t bytes = 0;
    for (size_t s = 0; s < plan_.shards.size(); ++s) {
      if (finished_[s]) continue;
      shards.push_back(s);
      for (size_t j = plan_.shards[s].job_begin; j < plan_.shards[s].job_end; ++j) {
        jobs.push_back(j);
        bytes += source_bytes(plan_.jobs[j]) * static_cast<uint64_t>(num_passes(plan_.jobs[j]));
      }
    }
    const BytePhase phase(progress_, options_.is_trial ? "measure" : "convert", bytes);
    SourceReader reader(plan_, jobs);
    ShardOutput output(plan_, folder);
    JobRunner runner(plan_, options_, reader, output, progress_, is_cancelled_);
    for (const size_t s : shards) {
      FamilyStatistics measured{};
      output.begin(s);
      for (size_t j = plan_.shards[s].job_begin; j < plan_.shards[s].job_end; ++j) runner.run(j, measured);
      output.end(measured);
      finished_[s] = FinishedShard{measured, {}};
    }
    output.finish();
  }

  void publish(WorkFolder& folder) {
    checkpoint::TensorHashes hashes;
    for (size_t s = 0; s < plan_.shards.size(); ++s) {
      finished_[s] = folder.finished(plan_.shards[s]);
      TESSERA_CHECK(finished_[s].has_value(), plan_.shards[s].file);
      hashes.insert(hashes.end(), finished_[s]->hashes.begin(), finished_[s]->hashes.end());
    }
    folder.publish(plan_.shards);
    for (const std::string& name : small_files_) {
      write_whole(join(out_, name), read_file(join(in_, name), kMaxSmallFileBytes));
    }
    checkpoint::write_hashes(out_, hashes);
    const FamilyStatistics families = sum();
    write_whole(join(out_, kReportJsonName), report_json(families));
    write_whole(join(out_, kReportSvgName), report_svg(families));
    write_whole(join(out_, "hf_quant_config.json"), configs_.hf_quant_config);
    // What other programs know a checkpoint by comes last, and both files or neither.
    write_index(out_, plan_);
    try {
      write_whole(join(out_, "config.json"), configs_.config);
    } catch (...) {
      std::error_code ignored;
      fs::remove(join(out_, checkpoint::kIndexName), ignored);
      throw;
    }
    folder.remove();
  }

  // In the order of shards, whenever they were made.
  FamilyStatistics sum() const {
    FamilyStatistics families{};
    for (const KeptMatrix& kept : plan_.kept) ++families[static_cast<size_t>(kept.family)].num_kept;
    for (const auto& shard : finished_) add(families, shard->statistics);
    return families;
  }

  Result result() {
    result_.families = sum();
    for (const Job& job : plan_.jobs) result_.source_bytes += source_bytes(job);
    result_.output_bytes = plan_.output_bytes;
    result_.num_shards = plan_.shards.size();
    return result_;
  }

  const std::string in_, out_;
  const Options& options_;
  LogSink* log_;
  ProgressSink* progress_;
  const std::atomic<bool>* is_cancelled_;
  const std::string config_path_;
  const model::Config config_;
  const std::string config_text_;
  const checkpoint::Checkpoint checkpoint_;
  const Plan plan_;
  ConvertedConfigs configs_;
  std::vector<std::string> small_files_;
  std::vector<std::optional<FinishedShard>> finished_;
  Result result_;
};

}  // namespace

Result convert(const std::string& in, const std::string& out, const Options& options, LogSink* log,
               ProgressSink* progress, const std::atomic<bool>* is_cancelled) {
  return Conversion(in, out, options, log, progress, is_cancelled).run();
}

bool is_unfinished(const std::string& out) {
  std::error_code error;
  return fs::exists(fs::path(out) / kWorkFolderName, error);
}

}  // namespace tessera::convert
