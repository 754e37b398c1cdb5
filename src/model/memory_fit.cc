// SPDX-License-Identifier: Apache-2.0
#include "model/memory_fit.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "base/error.h"
#include "base/integer_math.h"
#include "base/strings.h"
#include "model/cache_spec.h"
#include "ops/cache_entry.h"

namespace tessera::model {

int64_t ring_slots(const Config& config, int64_t step_tokens) {
  return config.sliding_window + std::min(step_tokens, kRingRows) - 1;
}

uint64_t sequence_bytes(const Config& config, const ops::Precision& precision, int64_t tokens, int64_t window_slots,
                        int64_t ranks) {
  const int64_t kv = ops::kv_entry_layout(precision, config.head_dim, config.rope_dim).entry_bytes();
  const int64_t paid_tokens = round_up(tokens, kPageTokens);
  uint64_t total = 0;
  for (const int64_t ratio : config.compress_ratios) {
    total += static_cast<uint64_t>(kv * window_slots);
    if (ratio == 0) continue;
    total += static_cast<uint64_t>(ceil_div(kv * (paid_tokens / ratio), ranks) + 24 * 4 * config.head_dim);
    if (ratio != 4) continue;
    const int64_t key = ops::index_entry_layout(precision, config.index_head_dim).entry_bytes();
    total += static_cast<uint64_t>(key * (paid_tokens / ratio) + 24 * 4 * config.index_head_dim);
  }
  return total;
}

uint64_t file_bytes(const std::string& directory) {
  uint64_t sum = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    std::error_code error;  // who loads says what is wrong with a file
    const uint64_t bytes = entry.path().extension() == ".safetensors" ? entry.file_size(error) : 0;
    if (!error) sum += bytes;
  }
  return sum;
}

int64_t room_for_caches(const std::string& directory, const device::Machine& machine, uint64_t step) {
  constexpr double kShare = 0.8;
  const auto available = static_cast<double>(machine.free_bytes());
  return static_cast<int64_t>(kShare * (available - static_cast<double>(file_bytes(directory) + step)));
}

void check_fit(uint64_t weights, uint64_t state, uint64_t work, const device::Machine& machine, uint64_t padding) {
  const uint64_t needed = weights + state + work;
  const uint64_t available = machine.free_bytes();
  if (needed <= available) return;
  const std::string where =
      machine.gpu.has_value() ? fmt::format("{} (cuda:{})", machine.gpu->name, machine.gpu->ordinal) : "this machine";
  // How many GPUs would hold it is more than a division: what is cut, what each has whole and what divides.
  const std::string advice =
      machine.gpu.has_value() ? "; tessera plan says how many such GPUs hold it, --gpus shares it over them (--device "
                                "cpu needs only the host's memory)"
                              : "";
  fail(ErrorCode::kResourceExhausted,
       fmt::format("does not fit: {} of weights{}, {} of sequence state and {} of work space need {}, {} has {} "
                   "available; {} are missing{}",
                   format_bytes(weights),
                   padding > 0 ? fmt::format(" ({} of it padding to the kernels' units)", format_bytes(padding)) : "",
                   format_bytes(state), format_bytes(work), format_bytes(needed), where, format_bytes(available),
                   format_bytes(needed - available), advice));
}

}  // namespace tessera::model
