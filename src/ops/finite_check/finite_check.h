// SPDX-License-Identifier: Apache-2.0
#pragma once
// Looks for what must not leave the model: first_bad[r] is the least index of a value of row r that is NaN or infinite,
// -1 where all are finite.
#include <cstdint>
#include <string>

#include "ops/variant.h"

namespace tessera::ops {

struct FiniteCheck {
  static constexpr const char* kName = "finite_check";
  struct Desc {
    int64_t width = 0;  // of a row, below 2^31
    std::string to_string() const;
  };
  struct Args {
    const float* values = nullptr;  // [num_rows, width]
    int32_t* first_bad = nullptr;   // out [num_rows]
    int64_t num_rows = 0;
  };
};

void finite_check_reference(const FiniteCheck::Desc& desc, const FiniteCheck::Args& args, device::Queue& queue);

}  // namespace tessera::ops
