// SPDX-License-Identifier: Apache-2.0
#include "doctor/op_recorder.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "ops/reference_rows.h"

namespace tessera::doctor {

void OpRecorder::clear() {
  outputs_.clear(), expert_ids_.clear();
  first_bad_.reset();
}

void OpRecorder::tensor(std::string_view name, const TensorView& value) {
  const int64_t count = value.shape.num_elements();
  if (name.ends_with("expert_ids") && value.dtype == DType::kI32) {
    expert_ids_.assign(value.as<int32_t>(), value.as<int32_t>() + count);
  }
  if (value.dtype != DType::kF32 && value.dtype != DType::kBF16) return;  // ids and cache bytes
  Output output{std::string(name), std::vector<float>(static_cast<size_t>(count))};
  ops::load_floats(value, 0, count, output.values.data());
  for (size_t i = 0; i < output.values.size() && !first_bad_; ++i) {
    // Index scores of entries that a token may not see are minus infinity by design.
    if (std::isfinite(output.values[i]) || output.values[i] == -INFINITY) continue;
    first_bad_ = fmt::format("{}: {} at element {} of {}", name, output.values[i], i, value.shape.to_string());
  }
  outputs_.push_back(std::move(output));
}

namespace {

// Not comparable row by row between modes: indexer vectors are rotated (Hadamard) where caches are FP8, and a token
// that is routed otherwise has other experts in its slots. What comes of them is compared: scores and ffn_out.
bool is_comparable(std::string_view name) {
  for (const char* suffix : {"indexer.queries", "indexer.compressor.entries", "ffn.experts", "ffn.expert_weights"}) {
    if (name.ends_with(suffix)) return false;
  }
  return true;
}

}  // namespace

int64_t num_rerouted(const OpRecorder& a, const OpRecorder& b, int64_t per_token) {
  const size_t width = static_cast<size_t>(per_token);
  if (a.expert_ids().size() != b.expert_ids().size() || width == 0) return 0;
  int64_t count = 0;
  for (size_t t = 0; t + width <= a.expert_ids().size(); t += width) {
    const auto sorted = [&](const OpRecorder& recorder) {
      std::vector<int32_t> ids(recorder.expert_ids().begin() + static_cast<int64_t>(t),
                               recorder.expert_ids().begin() + static_cast<int64_t>(t + width));
      std::sort(ids.begin(), ids.end());
      return ids;
    };
    count += sorted(a) != sorted(b) ? 1 : 0;
  }
  return count;
}

std::vector<OpError> compare_outputs(const OpRecorder& mode, const OpRecorder& exact) {
  std::vector<OpError> errors;
  const size_t count = std::min(mode.outputs().size(), exact.outputs().size());
  for (size_t i = 0; i < count; ++i) {
    const OpRecorder::Output &a = mode.outputs()[i], &b = exact.outputs()[i];
    if (a.name != b.name || a.values.size() != b.values.size() || !is_comparable(a.name)) continue;
    double difference = 0, norm = 0;
    for (size_t k = 0; k < a.values.size(); ++k) {
      if (!std::isfinite(a.values[k]) || !std::isfinite(b.values[k])) continue;
      const double off = static_cast<double>(a.values[k]) - b.values[k];
      difference += off * off, norm += static_cast<double>(b.values[k]) * b.values[k];
    }
    if (norm > 0) errors.push_back({a.name, std::sqrt(difference / norm)});
  }
  return errors;
}

}  // namespace tessera::doctor
