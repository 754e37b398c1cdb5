// SPDX-License-Identifier: Apache-2.0
#include "testing/trace_recorder.h"

#include <algorithm>

#include "ops/reference_rows.h"

namespace tessera::testing {

void TraceRecorder::tensor(std::string_view name, const TensorView& value) {
  const auto ends = [&](const std::string& suffix) { return name.ends_with(suffix); };
  if (!suffixes_.empty() && std::none_of(suffixes_.begin(), suffixes_.end(), ends)) return;
  const std::string key(name);
  const int64_t count = value.shape.num_elements();
  if (value.dtype == DType::kI32) {
    ints_[key].insert(ints_[key].end(), value.as<int32_t>(), value.as<int32_t>() + count);
  } else if (value.dtype == DType::kU8) {
    bytes_[key].insert(bytes_[key].end(), value.as<uint8_t>(), value.as<uint8_t>() + count);
  } else {
    std::vector<float>& all = floats_[key];
    all.resize(all.size() + static_cast<size_t>(count));
    ops::load_floats(value, 0, count, all.data() + all.size() - count);
  }
}

bool TraceRecorder::has(const std::string& name) const {
  return floats_.contains(name) || ints_.contains(name) || bytes_.contains(name);
}

}  // namespace tessera::testing
