// SPDX-License-Identifier: Apache-2.0
#pragma once
// How linears take their inputs, and how caches hold their entries (docs/contracts/numerics.md, section 2).
#include <cstdint>
#include <optional>
#include <string_view>

#include "tensor/dtype.h"

namespace tessera::ops {

enum class InputMode : uint8_t {
  kF32,  // nothing is rounded anywhere
  kA16,  // BF16 activations
  kA4,   // NVFP4 activations where the weight is NVFP4, BF16 elsewhere
  kA8,   // E4M3 by 128 with power-of-two scales where the weight is quantised, BF16 elsewhere
};

enum class CacheMode : uint8_t {
  kExact,  // as computed; no Hadamard
  kFp8,    // key/value entries E4M3 by 64, indexer keys and queries Hadamard and E2M1 by 32
};

struct Precision {
  InputMode input = InputMode::kA16;
  CacheMode cache = CacheMode::kFp8;
  // How activations and residual streams are stored between ops, which is where values are rounded.
  DType activation() const { return input == InputMode::kF32 ? DType::kF32 : DType::kBF16; }
  friend bool operator==(const Precision&, const Precision&) = default;
};

std::string_view to_string(InputMode mode);  // "f32", "a16", "a4", "a8"
std::string_view to_string(CacheMode mode);  // "exact", "fp8"
std::optional<InputMode> input_mode_from_name(std::string_view name);
std::optional<CacheMode> cache_mode_from_name(std::string_view name);

}  // namespace tessera::ops
