// SPDX-License-Identifier: Apache-2.0
#include "trace_printer.h"

#include <fmt/format.h>

#include <cmath>
#include <vector>

#include "console.h"
#include "ops/reference_rows.h"

namespace tessera::app {

void TracePrinter::tensor(std::string_view name, const TensorView& value) {
  if (value.dtype != DType::kF32 && value.dtype != DType::kBF16) return;  // ids and cache bytes have no range to show
  const int64_t count = value.shape.num_elements();
  if (count == 0) return;  // scores before the first compressed entry, for example
  std::vector<float> values(static_cast<size_t>(count));
  ops::load_floats(value, 0, count, values.data());
  float min = INFINITY, max = -INFINITY;
  int64_t num_bad = 0, first_bad = -1;
  for (int64_t i = 0; i < count; ++i) {
    const float x = values[static_cast<size_t>(i)];
    if (!std::isfinite(x)) {
      if (num_bad++ == 0) first_bad = i;
      continue;
    }
    min = x < min ? x : min;
    max = x > max ? x : max;
  }
  std::string line = fmt::format("{:<48} {:<18} min {:<13.6g} max {:<13.6g}", name, value.shape.to_string(), min, max);
  if (num_bad > 0) {
    const float bad = values[static_cast<size_t>(first_bad)];
    line += fmt::format(" {} NOT FINITE, first {} at element {}", num_bad, bad, first_bad);
    if (!first_fault_)
      first_fault_ = fmt::format("{}: {} at element {} of {}", name, bad, first_bad, value.shape.to_string());
  }
  if (prints_) print_note(line);
}

}  // namespace tessera::app
