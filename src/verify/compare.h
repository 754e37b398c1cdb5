// SPDX-License-Identifier: Apache-2.0
#pragma once
// How close a variant's output must be to the reference's (docs/contracts/numerics.md, section 5).
#include <span>
#include <string>

#include "tensor/tensor_view.h"

namespace tessera::verify {

constexpr double kBf16Bound = 4e-3, kF32Bound = 1e-5;

// ||a - b|| / ||b|| in double; NaN where either holds one. Vectors of an RMS below 2^-110 count as
// of that RMS.
double relative_error(std::span<const float> a, std::span<const float> b);

// kValues is the contract's. kRows is for outputs behind a rounding inside the op: a value there that falls the other
// way moves one output by more than kValues allows where terms cancel, as sums of heavy tails do.
enum class Rule {
  kBits,    // every byte equal
  kNorm,    // relative_error() over all values
  kRows,    // that, and for each row (the last dimension) alone at most twice the bound
  kValues,  // kNorm, and for BF16 each value by |a - b| <= 2^-7 |b| + 4e-3 RMS of its row
};

struct Difference {
  int64_t num_different = 0;  // values whose bits differ
  double error = 0;           // relative; with kBits 0 or infinite
  std::string what;           // empty: within `bound`
};

// Values that have the same bits in both do not differ, whatever they are: what the reference left alone, and infinite
// states. `found` and `expected` have the same dtype (F32 or BF16, except with kBits) and shape.
Difference compare(const TensorView& found, const TensorView& expected, Rule rule, double bound);

}  // namespace tessera::verify
