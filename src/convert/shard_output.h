// SPDX-License-Identifier: Apache-2.0
#pragma once
// Writes shards and hashes their tensors on a thread of its own, so that the disk and the next computation overlap.
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/safetensors_writer.h"
#include "checkpoint/tensor_hashes.h"
#include "convert/bounded_queue.h"
#include "convert/plan.h"
#include "convert/statistics.h"
#include "convert/work_folder.h"

namespace tessera::convert {

constexpr uint64_t kWriteBehindBytes = 128 << 20;

class ShardOutput {
 public:
  // `folder` null: nothing is written (a trial).
  ShardOutput(const Plan& plan, const WorkFolder* folder);
  ~ShardOutput();

  // Opens shard `shard`; the one before must have been ended.
  void begin(size_t shard);
  // The next bytes of tensor `tensor` of the plan. Parts of one tensor come in order; tensors in any order.
  void write(size_t tensor, std::unique_ptr<uint8_t[]> data, uint64_t bytes);
  // All tensors of the shard were given: it is flushed, and recorded as finished with these statistics.
  void end(const FamilyStatistics& statistics);
  // Waits until everything is on the disk. All calls throw what writing threw: kResourceExhausted for a full disk.
  void finish();

 private:
  enum class Step { kBegin, kWrite, kEnd };
  struct Task {
    Step step = Step::kWrite;
    size_t index = 0;  // shard or tensor
    std::unique_ptr<uint8_t[]> data;
    uint64_t bytes = 0;
    FamilyStatistics statistics;
  };
  void push(Task task);
  void run();
  void begin_shard(size_t shard);
  void write_part(const Task& task);
  void end_shard(const FamilyStatistics& statistics);

  const Plan& plan_;
  const WorkFolder* folder_;
  // Of the writing thread, while a shard is open.
  size_t shard_ = 0;
  std::unique_ptr<checkpoint::SafetensorsWriter> writer_;
  std::map<size_t, std::pair<checkpoint::TensorHasher, uint64_t>> tensors_;  // by index: hash and bytes so far
  BoundedQueue<Task> queue_;
  std::thread thread_;
};

}  // namespace tessera::convert
