// SPDX-License-Identifier: Apache-2.0
#include "device/queue.h"

#include <algorithm>

#include "base/error.h"
#include "device/machine.h"

namespace tessera::device {

namespace {

// Parts per thread: more of them even out cores of unequal speed, fewer cost fewer claims.
constexpr int64_t kPartsPerThread = 2;

int threads_or_default(int num_threads) {
  return num_threads > 0 ? num_threads : usable_cores();
}

}  // namespace

Queue::Queue(int num_threads) : pool_(threads_or_default(num_threads)) {}

Queue::Queue(int num_threads, const CpuPlacement& placement)
    : pool_(threads_or_default(num_threads),
            placement.topology().is_imagined ? std::vector<std::vector<int>>() : placement.pins(num_threads).places) {}

void Queue::begin_recording() {
  op_ = {}, noted_ = nullptr;
  is_recording_ = true, is_in_op_ = false;
}

std::string Queue::op_being_recorded() const {
  if (op_.op == nullptr) return "a step, before its first op";
  std::string name = op_.where != nullptr ? std::string(op_.where) + " " : "";
  name += std::string("(") + op_.op + ", " + op_.variant + ")";
  return is_in_op_ ? name : "a step, after " + name;
}

void Queue::refuse_while_recording(const char* what) const {
  if (is_recording_) fail(ErrorCode::kDeviceError, std::string(what) + " can't be recorded");
}

bool Queue::note_while_recording(const char* what) noexcept {
  if (is_recording_ && noted_ == nullptr) noted_ = what;
  return is_recording_;
}

void Queue::refuse_noted() const {
  if (noted_ != nullptr) refuse_while_recording(noted_);
}

void Queue::parallel_for(int64_t count, int64_t grain, RangeFunction function) {
  if (count <= 0) return;
  const int64_t useful = std::max<int64_t>(1, count / std::max<int64_t>(1, grain));
  const int64_t num_parts = num_threads() == 1 ? 1 : std::min(kPartsPerThread * num_threads(), useful);
  if (num_parts == 1) {
    function(0, count);
  } else {
    pool_.run(count, num_parts, function);
  }
}

}  // namespace tessera::device
