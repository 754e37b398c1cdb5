// SPDX-License-Identifier: Apache-2.0
#include "convert/shard_output.h"

#include <fmt/format.h>

#include "base/error.h"

namespace tessera::convert {

ShardOutput::ShardOutput(const Plan& plan, const WorkFolder* folder)
    : plan_(plan), folder_(folder), queue_(kWriteBehindBytes), thread_([this] { run(); }) {}

ShardOutput::~ShardOutput() {
  // Without finish() something failed elsewhere: shards that were ended are still written and recorded.
  queue_.close();
  if (thread_.joinable()) thread_.join();
}

void ShardOutput::push(Task task) {
  const uint64_t bytes = task.bytes;
  queue_.push(std::move(task), bytes);
}

void ShardOutput::begin(size_t shard) {
  Task task;
  task.step = Step::kBegin;
  task.index = shard;
  push(std::move(task));
}

void ShardOutput::write(size_t tensor, std::unique_ptr<uint8_t[]> data, uint64_t bytes) {
  Task task;
  task.index = tensor;
  task.data = std::move(data);
  task.bytes = bytes;
  push(std::move(task));
}

void ShardOutput::end(const FamilyStatistics& statistics) {
  Task task;
  task.step = Step::kEnd;
  task.statistics = statistics;
  push(std::move(task));
}

void ShardOutput::finish() {
  queue_.close();
  thread_.join();
  queue_.pop();  // throws what the thread left
}

void ShardOutput::run() {
  try {
    while (const std::optional<Task> task = queue_.pop()) {
      switch (task->step) {
        case Step::kBegin:
          begin_shard(task->index);
          break;
        case Step::kWrite:
          write_part(*task);
          break;
        case Step::kEnd:
          end_shard(task->statistics);
          break;
      }
    }
  } catch (...) {
    queue_.fail(std::current_exception());
  }
  writer_.reset();
}

void ShardOutput::begin_shard(size_t shard) {
  shard_ = shard;
  if (folder_ == nullptr) return;
  std::vector<checkpoint::TensorSpec> tensors;
  tensors_.clear();
  const PlannedShard& planned = plan_.shards[shard];
  for (size_t j = planned.job_begin; j < planned.job_end; ++j) {
    const Job& job = plan_.jobs[j];
    for (size_t t = 0; t < num_tensors(job); ++t) {
      tensors.push_back(plan_.tensors[job.first_tensor + t]);
      tensors_[job.first_tensor + t] = {};
    }
  }
  writer_ = std::make_unique<checkpoint::SafetensorsWriter>(folder_->shard_path(planned), std::move(tensors),
                                                            checkpoint::SafetensorsWriter::Metadata{{"format", "pt"}});
}

void ShardOutput::write_part(const Task& task) {
  if (writer_ == nullptr) return;
  auto& [hasher, bytes] = tensors_[task.index];
  hasher.update(task.data.get(), task.bytes);
  writer_->write_part(plan_.tensors[task.index].name, bytes, task.data.get(), task.bytes);
  bytes += task.bytes;
}

void ShardOutput::end_shard(const FamilyStatistics& statistics) {
  if (writer_ == nullptr) return;
  writer_->finish();
  writer_.reset();
  FinishedShard finished{statistics, {}};
  const PlannedShard& planned = plan_.shards[shard_];
  for (size_t j = planned.job_begin; j < planned.job_end; ++j) {
    const Job& job = plan_.jobs[j];
    for (size_t t = job.first_tensor; t < job.first_tensor + num_tensors(job); ++t) {
      finished.hashes.emplace_back(plan_.tensors[t].name, tensors_[t].first.hex());
    }
  }
  folder_->record(planned, finished);
}

}  // namespace tessera::convert
